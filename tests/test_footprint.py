"""Memory of a rank from the actions it runs: by hand."""

from __future__ import annotations

from snnpart.footprint import Footprint, in_shards, of_rank
from snnpart.program import Action


def peak(actions: str, **stages: Footprint) -> int:
    return of_rank([Action.parse(text) for text in actions.split()], {int(k[1:]): v for k, v in stages.items()}).peak


def test_gradients_are_not_there_before_the_first_backward() -> None:
    stage = Footprint(parameters=10, gradients=10, optimizer=20, saved=100)
    assert peak("0F0 0F1", s0=stage) == 10 + 20 + 2 * 100
    assert peak("0F0 0B0 0F1", s0=stage) == 10 + 10 + 20 + 100


def test_an_action_needs_more_than_it_leaves() -> None:
    stage = Footprint(parameters=10, gradients=10, optimizer=20, saved=100, forward=7, first_backward=30, backward=25)
    assert peak("0F0 0F1", s0=stage) == 30 + 200 + 7
    assert peak("0F0 0F1 0B0 0B1", s0=stage) == 30 + 200 + 30
    assert peak("0F0 0B0 0F1 0B1", s0=stage) == 40 + 100 + 25


def test_a_second_gradient_is_there_beside_the_sum() -> None:
    stage = Footprint(parameters=10, gradients=10, optimizer=20, saved=100, gates=3, largest=9)
    assert peak("0F0 0I0 0W0 0F1 0I1 0W1", s0=stage) == 40 + 103 + 9


def test_the_optimizer_needs_a_value_for_each_number() -> None:
    stage = Footprint(parameters=10, gradients=10, optimizer=20, buffers=3, saved=1, workspace=5)
    assert peak("0F0 0B0", s0=stage) == 40 + 3 + 5 + 10


def test_the_first_half_of_a_backward_leaves_gradients() -> None:
    stage = Footprint(saved=100, inputs=40, gates=25)
    assert peak("1F0 1I0 1W0", s1=stage) == 140
    assert peak("1F0 1I0 1F1 1W0", s1=stage) == 100 + 25 + 100


def test_stages_of_a_rank_are_held_together() -> None:
    first, last = Footprint(parameters=1, saved=100), Footprint(parameters=2, saved=10, workspace=6)
    assert peak("0F0 3F0 3B0 0B0", s0=first, s3=last) == 1 + 2 + 6 + 110


def test_shards_and_what_is_gathered() -> None:
    whole = Footprint(parameters=103, gradients=100, optimizer=200, buffers=5, saved=7)
    units = [10, 50, 40]
    again = in_shards(whole, units, 4, True, 1)
    assert again.parameters == 3 + 3 + 13 + 10 and again.gathered == 90
    assert again.optimizer == 2 * 26 and again.gradients == 100
    kept = in_shards(whole, units, 100, False, 1)
    assert kept.gathered == 100 and kept.gradients == 93 and in_shards(whole, units, 100, False, 2).gradients == 100
