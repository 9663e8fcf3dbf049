"""Every sample once, the same batches on any number of ranks, and an interrupted epoch goes on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snnpart.vision.data.sampler import Share, Shares


def steps_of(length: int, batch: int, dp: int, **options: object) -> list[list[Share]]:
    """Per step, what each rank takes."""
    ranks = [list(Shares(length, batch, dp, rank, **options)) for rank in range(dp)]  # type: ignore[arg-type]
    assert all(len(list(rank)) == len(Shares(length, batch, dp, 0, **options)) for rank in ranks)  # type: ignore[arg-type]
    return [list(step) for step in zip(*ranks, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 16))
def test_evaluation_counts_every_sample_once(length: int, batch: int, dp: int) -> None:
    counted = [index for step in steps_of(length, batch, dp) for share in step for index in share.indices[: share.real]]
    assert sorted(counted) == list(range(length))
    assert all(share.indices for step in steps_of(length, batch, dp) for share in step), "a rank has nothing to run"


def test_a16_ranks_without_a_sample() -> None:
    """Case A16: 10 samples, 16 ranks: six ranks run a filler that is not counted."""
    (step,) = steps_of(10, 4, 16)
    assert sum(share.real for share in step) == 10
    assert [share.real for share in step].count(0) == 6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_the_order_does_not_depend_on_the_ranks(length: int, batch: int, dp: int, epoch: int) -> None:
    """4 * batch samples a step on one, two and four ranks."""
    one = steps_of(length, 4 * batch, 1, order=(3, epoch), smallest=1)
    many = steps_of(length, 4 * batch // dp, dp, order=(3, epoch), smallest=1)
    for single, shares in zip(one, many, strict=False):
        assert list(single[0].indices) == [index for share in shares for index in share.indices]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 6), st.integers(1, 4), st.data())
def test_an_interrupted_pass_goes_on(length: int, batch: int, dp: int, data: st.DataObject) -> None:
    whole = steps_of(length, batch, dp, order=(0, 1), smallest=1)
    seen = data.draw(st.integers(0, len(whole)))
    position = sum(step[0].together for step in whole[:seen])
    assert steps_of(length, batch, dp, order=(0, 1), smallest=1, position=position) == whole[seen:]


def test_training_leaves_out_a_step_that_not_every_rank_can_run() -> None:
    assert len(Shares(10, 2, 4, smallest=1)) == 1
    assert len(Shares(12, 2, 4, smallest=1)) == 2
    assert [share.real for share in Shares(12, 2, 4, smallest=1)] == [2, 1]


@pytest.mark.parametrize("epoch", [1, 2])
def test_epochs_differ(epoch: int) -> None:
    first = [share.indices for share in Shares(32, 8, order=(0, 0))]
    assert first != [share.indices for share in Shares(32, 8, order=(0, epoch))]
    assert first == [share.indices for share in Shares(32, 8, order=(0, 0))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(4, 7), min_size=1, max_size=70), st.integers(1, 6), st.integers(1, 4), st.data())
def test_steps_of_several_t_hold_one_each_and_go_on_anywhere(
    lengths: list[int], batch: int, dp: int, data: st.DataObject
) -> None:
    given_lengths = {"lengths": tuple(lengths)}
    counted = [
        [index for share in step for index in share.indices[: share.real]]
        for step in steps_of(len(lengths), batch, dp, **given_lengths)
    ]
    assert sorted(sum(counted, [])) == list(range(len(lengths))), "evaluation counts every sample once"
    training = {**given_lengths, "order": (0, 1), "smallest": 1}
    whole = steps_of(len(lengths), batch, dp, **training)
    for step in whole:
        assert len({lengths[index] for share in step for index in share.indices}) == 1
        assert all(share.real for share in step)
    seen = data.draw(st.integers(0, len(whole)))
    position = sum(step[0].together + step[0].skipped for step in whole[:seen])
    rest = steps_of(len(lengths), batch, dp, **training, position=position)
    assert [[share.indices for share in step] for step in rest] == [[s.indices for s in step] for step in whole[seen:]]
    shares = Shares(len(lengths), batch, dp, **training)  # type: ignore[arg-type]
    assert shares.taken == sum(step[0].together for step in whole) >= len(lengths) - 4 * (dp - 1)


def test_runs_of_one_t_are_mixed() -> None:
    lengths = (4, 5) * 2048
    found = [lengths[share.indices[0]] for share in Shares(4096, 64, order=(0, 0), smallest=1, lengths=lengths)]
    assert len(found) == 64 and 1 < sum(a != b for a, b in zip(found, found[1:], strict=False)) < 8
