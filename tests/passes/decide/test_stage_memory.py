"""Memory of pipeline ranks: the cut under a bound is the best of all, is kept by the lowered program, or is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from snnpart.api import parallelize
from snnpart.costs import CPU
from snnpart.errors import PlanError
from snnpart.footprint import Footprint, held_together, of_rank
from snnpart.graph import SpikeGraph
from snnpart.orders import make_schedule
from snnpart.passes.decide import decide
from snnpart.passes.decide.parts import find_parts
from snnpart.passes.decide.places import Places
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from tests.lowering import analysed, make


def residual() -> SpikeGraph:
    module, inputs, options = make("residual")
    return analysed(module, inputs, **options)


def program(name: str, **how: Any) -> CompiledProgram:
    module, inputs, options = make(name)
    graph = analysed(module, inputs, **options)
    return lower(graph, decide(graph, profile=CPU, tp=how.pop("tp", 1), **how), profile=CPU)


def largest(compiled: CompiledProgram) -> int:
    plan = compiled.plan
    return max(compiled.footprint(rank, tp).total for rank in range(plan.pp) for tp in range(plan.tp))


@pytest.mark.parametrize("name", ["residual", "unet", "skip", "loop", "two"])
def test_places_hold_what_the_lowered_stages_hold(name: str) -> None:
    """Every cut into two and three stages: the bytes by places are those counted in the stage graphs."""
    module, inputs, options = make(name)
    graph = analysed(module, inputs, **options)
    parts = find_parts(graph)
    places = Places.of(graph, parts, parts.keyed, 1)
    held = places.held()
    for pp in range(2, min(3, places.count) + 1):
        plan = decide(graph, tp=1, pp=pp, microbatches=1, schedule="gpipe", profile=CPU)
        compiled = lower(graph, plan, profile=CPU)
        owner = dict.fromkeys((), plan.stages)
        assert not owner
        firsts = _firsts(compiled, parts.keyed)
        bounds = [0, *firsts, places.count]
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
            footprint = compiled.stage(stage, 0).footprint
            (bytes_,) = held.of_stages([1.0])
            assert bytes_[start, stop] == footprint.total, (pp, stage)


def _firsts(compiled: CompiledProgram, order: Any) -> list[int]:
    """The first places of the stages 1.., from where the tensors and leaves of the parts went."""
    where = {part.name: stage for (stage, _), p in compiled.stages.items() for part in p.tensors}
    where |= {path: stage for (stage, _), p in compiled.stages.items() for path in p.leaves}
    stages = [where[part.keys[0]] for part in order]
    return [stages.index(stage) for stage in range(1, compiled.plan.stage_count)]


@pytest.mark.parametrize(
    ("pp", "schedule", "microbatches"),
    [
        (2, "1f1b", 4),
        (3, "gpipe", 2),
        (2, "zbv", 4),
        (2, "interleaved-1f1b", 4),
    ],
)
def test_a_bound_moves_the_cut_and_is_kept(pp: int, schedule: str, microbatches: int) -> None:
    """Each bound is one byte less than what the cut under the bound before holds, until it is refused."""
    how = {"pp": pp, "schedule": schedule, "microbatches": microbatches}
    free = program("residual", **how)
    limit = largest(free) - 1
    with pytest.raises(PlanError, match="memory= allows"):
        while True:
            bound = program("residual", **how, memory=limit)
            assert largest(bound) <= limit and bound.plan.memory == limit
            limit = largest(bound) - 1
    assert limit < largest(free) - 1


def test_the_least_of_all_cuts_is_found_and_named() -> None:
    """One stage a rank: no cut that a user could ask for holds less than the bound that is refused."""
    graph = residual()
    order = find_parts(graph).keyed
    least = min(largest(lower(graph, _plan(graph, cut, order), profile=CPU)) for cut in range(1, len(order)))
    decide(graph, tp=1, pp=2, microbatches=2, profile=CPU, memory=least)
    with pytest.raises(PlanError) as refused:
        decide(graph, tp=1, pp=2, microbatches=2, profile=CPU, memory=least - 1)
    assert f"holds at least {least / 1e6:.3g} MB with pp=2, schedule='1f1b' and 2 microbatches" in str(refused.value)
    assert "pp=4" in str(refused.value)


def _plan(graph: Any, cut: int, order: Any) -> Plan:
    stages = {key: int(i >= cut) for i, part in enumerate(order) for key in part.keys}
    pinned = Plan(pp=2, microbatches=2, stages=stages)
    return decide(graph, tp=1, pp=2, microbatches=2, profile=CPU, pinned=pinned)


def test_gpipe_is_told_that_1f1b_holds_less() -> None:
    graph, how = residual(), {"pp": 2, "microbatches": 4, "tp": 1, "profile": CPU}
    low = largest(lower(graph, decide(graph, schedule="1f1b", **how), profile=CPU))
    with pytest.raises(PlanError, match=r'take schedule="1f1b", microbatches=4'):
        decide(graph, schedule="gpipe", **how, memory=low)


def test_one_f_one_b_gives_later_stages_more_layers() -> None:
    """What is in flight shrinks from stage to stage, so the bound moves the cut towards the front."""
    net = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())])
    x = torch.randn(64, 64)
    how: dict[str, Any] = {"pp": 4, "microbatches": 8, "example_inputs": x, "verify": "off", "profile": CPU}
    free = parallelize(net, **how).compiled
    tight = parallelize(net, memory=int(largest(free) * 0.92), **how).compiled
    layers = [len(tight.stage(stage, 0).tensors) for stage in range(4)]
    assert layers[0] < layers[-1] and largest(tight) <= 0.92 * largest(free)
    assert [free.stage(stage, 0).footprint.in_flight for stage in range(4)] == [4, 3, 2, 1]


def test_a_rank_counts_its_stages_at_one_time() -> None:
    """ZBV: rank 0 holds the first and the last stage, most of the first while it waits for the second to end."""
    order = make_schedule("zbv", 2, 4, 2)[0]
    moments = held_together(order)
    first, last = Footprint(saved=10), Footprint(saved=1)
    walked, now = 0, {0: 0, 3: 0}
    for action in order:
        now[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        walked = max(walked, 10 * now[0] + now[3])
    assert of_rank(order, {0: first, 3: last}).saved == walked
    assert len(moments) < len(order)
