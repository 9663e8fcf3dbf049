"""FSDP2's units: balanced cuts of a stage's parameters, and their number by a simulated step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from snnpart.api import parallelize
from snnpart.costs import CPU, H200, Link, MachineProfile
from snnpart.errors import ConfigError
from snnpart.passes.decide.units import Atom, balanced, step_us
from snnpart.plan import Plan
from tests.lowering import fire


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4, 5], [9, 1, 1, 1], [1, 1, 1, 9], [3], [2, 2, 7, 1, 3, 3, 1]], ids=str)
def test_the_largest_piece_is_as_small_as_can_be(sizes: list[float]) -> None:
    for number, borders in enumerate(balanced(sizes, len(sizes)), 1):
        pieces = [sum(sizes[a:b]) for a, b in itertools.pairwise(borders)]
        assert len(pieces) == number and borders[0] == 0 and borders[-1] == len(sizes) and min(pieces) > 0
        others = itertools.combinations(range(1, len(sizes)), number - 1)
        every = [[sum(sizes[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sizes)])] for cuts in others]
        assert max(pieces) == min(map(max, every))


def linked(bandwidth: float, latency_us: float) -> MachineProfile:
    """A machine that computes at once but for what the atoms say."""
    return replace(CPU, copy=math.inf, launch_us=0.0, links={**CPU.links, "dp": Link(bandwidth, latency_us)})


def test_a_step_by_hand() -> None:
    """Two units of 2 MB over two ranks: 1 MB a message at 1 GB/s is 1000 us, and 10 us of latency."""
    units = [Atom(["a"], 2e6, 500.0, 2000.0), Atom(["b"], 2e6, 500.0, 2000.0)]
    machine = linked(1e9, 10.0)
    first, second = 1010.0, 2020.0  # gathers; the second outlasts the forward of the first
    forward = second + 500.0
    assert step_us(units, machine, again=False, microbatches=1) == forward + 4000.0 + 1010.0
    assert step_us(units[:1], machine, again=False, microbatches=1) == first + 500.0 + 2000.0 + 1010.0
    # the last one stays; the gather of the first is hidden behind the backward of the last
    assert step_us(units, machine, again=True, microbatches=1) == forward + 4000.0 + 1010.0
    short = [Atom(["a"], 2e6, 500.0, 500.0), Atom(["b"], 2e6, 500.0, 500.0)]
    assert step_us(short, machine, again=True, microbatches=1) == forward + 1010.0 + 1010.0 + 1010.0
    kept = step_us(units, machine, again=False, microbatches=3) - step_us(units, machine, again=False, microbatches=1)
    assert kept == 2 * (1000.0 + 4000.0)


class Wide(nn.Module):
    """Eight blocks of a linear layer with a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(8))
        self.head, self.scale = nn.Linear(64, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = fire(block(x))
        out: torch.Tensor = self.head(x) * self.scale
        return out


def units_of(machine: MachineProfile, batch: int = 8, **asked: object) -> tuple[dict[str, int], bool]:
    program = parallelize(
        Wide(), example_inputs=torch.randn(batch, 64), verify="off", dp="fsdp2", profile=machine, **asked
    )
    return program.plan.units, program.plan.reshard


def test_slow_messages_want_few_units_and_large_ones_many() -> None:
    """Where a message costs its latency one is best; where it costs its bytes the first and last should be small."""
    few, again = units_of(linked(1e12, 500.0))
    assert set(few.values()) == {0} and not again
    many, _ = units_of(linked(1e9, 0.01))
    assert max(many.values()) >= 4


def test_parameters_are_sharded_again_where_that_is_hidden() -> None:
    assert units_of(linked(2e11, 0.01), batch=4096)[1]
    assert not units_of(linked(1e8, 0.01))[1]


def test_what_is_asked_for_is_done() -> None:
    units, again = units_of(H200, fsdp_units=3, fsdp_reshard=True)
    assert sorted(set(units.values())) == [0, 1, 2] and again
    assert [units[f"blocks.{i}.0"] for i in range(8)] == sorted(units[f"blocks.{i}.0"] for i in range(8))
    assert all(units[f"blocks.{i}.0"] == units[f"blocks.{i}.1"] for i in range(8))
    assert "scale" not in units
    most, _ = units_of(H200, fsdp_units=100)
    assert len(set(most.values())) == 9
    assert units_of(H200, fsdp_reshard=False)[1] is False


def test_a_pipeline_gathers_once_a_step() -> None:
    for microbatches, memory, again in ((1, None, True), (2, None, False), (2, 1 << 30, True)):
        asked = {"microbatches": microbatches, "memory": memory}
        assert units_of(linked(2e11, 0.01), batch=4096, **asked)[1] is again


def test_units_are_numbered_over_all_stages() -> None:
    program = parallelize(
        Wide(), example_inputs=torch.randn(8, 64), verify="off", dp="fsdp2", pp=2, fsdp_units=2, microbatches=2
    )
    stages, units = program.plan.stages, program.plan.units
    assert {(stages[path], unit) for path, unit in units.items()} == {(0, 0), (0, 1), (1, 2), (1, 3)}


def test_a_given_plan_keeps_its_units() -> None:
    plan = Plan(dp="fsdp2", units={"blocks": 0, "head": 1}, reshard=True)
    program = parallelize(Wide(), example_inputs=torch.randn(8, 64), verify="off", plan=plan)
    assert program.plan.units == plan.units and program.plan.reshard
    assert Plan.from_json(program.plan.to_json()) == program.plan


@pytest.mark.parametrize(
    ("asked", "text"),
    [({"fsdp_units": 0}, "fsdp_units=0 is not a positive integer"), ({"fsdp_reshard": "yes"}, "fsdp_reshard='yes'")],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        units_of(H200, **asked)
