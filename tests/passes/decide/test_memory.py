"""The memory bound of the placement: kept by the lowered program, refused with what is possible and what would help."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from snnpart import facts, parallelize
from snnpart.costs import CPU, Link
from snnpart.errors import ConfigError, PlanError
from snnpart.facts import Block, Cost
from snnpart.graph import SpikeGraph
from snnpart.passes.decide import decide, placement_program
from snnpart.passes.decide.lanes import find_lanes
from snnpart.passes.decide.memory import TRAINED_COPIES
from snnpart.passes.decide.placement_program import Choice, least_bytes, solve
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from tests.lowering import Residual, analysed, make

FAST = replace(CPU, links={"tp": Link(1e11, 0.5)}, launch_us=0.01)


def chain() -> SpikeGraph:
    layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)]
    return analysed(nn.Sequential(*layers).double(), (torch.randn(4, 2, 12, 12, dtype=torch.float64),))


def held(graph: SpikeGraph, shards: dict[str, str]) -> float:
    """What the larger rank of the lowered program holds, counted from its tensors and its nodes."""
    program = lower(graph, Plan(tp=2, shards=shards), profile=CPU)

    def of(rank: int) -> float:
        stage = program.stage(0, rank)
        costs = [cost for node in stage.graph.nodes if (cost := facts.get(node, Cost)) is not None]
        tensors = sum(
            torch.Size(t.shape).numel() * t.dtype.itemsize * (TRAINED_COPIES if t.has_gradient else 1)
            for t in stage.tensors
        )
        return tensors + sum(cost.saved for cost in costs)

    return max(of(rank) for rank in range(2))


def every_choice() -> dict[tuple[str, ...], dict[str, str]]:
    rules = ("column", "row", "scatter", "replicate")
    return {chosen: dict(zip("035", chosen)) for chosen in itertools.product(rules, repeat=3)}


def test_the_bytes_of_every_choice_are_those_of_its_program() -> None:
    """64 placements of three layers: the linear function says what the lowered program holds."""
    graph = chain()
    lanes = find_lanes(graph, 2)
    groups = {group.path: group for group in lanes.groups}
    for shards in every_choice().values():
        pins = Choice({groups[path]: rule for path, rule in shards.items()}, {})
        said = sum(least_bytes(graph, lanes, 2, CPU, pins))
        assert said == pytest.approx(held(graph, shards), rel=1e-9), shards


@pytest.mark.parametrize("profile", [CPU, FAST], ids=["cpu", "fast"])
def test_the_fastest_choice_that_fits_is_taken(profile: object) -> None:
    graph = chain()
    table = {
        rules: (lower(graph, Plan(tp=2, shards=shards), profile=profile).stage(0, 0).predicted_us, held(graph, shards))  # type: ignore[arg-type]
        for rules, shards in every_choice().items()
    }
    sizes = sorted({size for _, size in table.values()})
    for bound in (sizes[0], sizes[len(sizes) // 3], sizes[-1]):
        plan = decide(graph, tp=2, pp=1, profile=profile, objective="time", memory=int(bound) + 1)  # type: ignore[arg-type]
        best = min(us for us, size in table.values() if size <= bound + 1)
        assert lower(graph, plan, profile=profile).stage(0, 0).predicted_us == pytest.approx(best, rel=1e-6)  # type: ignore[arg-type]
        assert held(graph, plan.shards) <= bound + 1


@pytest.mark.parametrize("name", ["residual", "unet", "widths"])
@pytest.mark.parametrize("tp", [2, 3])
def test_the_bound_is_never_below_what_the_program_holds(name: str, tp: int) -> None:
    module, inputs, options = make(name)
    graph = analysed(module, inputs, **options)
    lanes = find_lanes(graph, tp)
    choice = solve(graph, lanes, tp, CPU, Choice({}, {}), shard_all=True)
    said = sum(least_bytes(graph, lanes, tp, CPU, choice))
    plan = decide(graph, tp=tp, pp=1, profile=CPU)
    program = lower(graph, plan, profile=CPU)
    for rank in range(tp):
        stage = program.stage(0, rank)
        saved = sum(cost.saved for node in stage.graph.nodes if (cost := facts.get(node, Cost)) is not None)
        tensors = sum(
            torch.Size(t.shape).numel() * t.dtype.itemsize * (TRAINED_COPIES if t.has_gradient else 1)
            for t in stage.tensors
        )
        assert tensors + saved <= said * (1 + 1e-9)


def test_slow_links_share_only_what_memory_asks_for() -> None:
    graph = chain()
    free = decide(graph, tp=2, pp=1, profile=CPU, objective="time")
    assert free.shards == {}
    tight = decide(graph, tp=2, pp=1, profile=CPU, objective="time", memory=int(0.8 * held(graph, {})))
    full = decide(graph, tp=2, pp=1, profile=CPU)
    assert tight.shards and held(graph, tight.shards) < held(graph, {})
    assert held(graph, full.shards) <= held(graph, tight.shards)


def test_what_no_sharding_fits_says_what_is_possible_and_what_would_help() -> None:
    module, x = Residual(16, 16).double(), torch.randn(4, 2, 8, 8, dtype=torch.float64)
    compile_with = partial(parallelize, module, tp=2, example_inputs=x, input_layout="NCHW", verify="off", profile=CPU)
    least = sum(least_bytes(graph := compile_with().compiled.source, find_lanes(graph, 2), 2, CPU, Choice({}, {})))
    with pytest.raises(PlanError) as refused:
        compile_with(memory=int(0.8 * least))
    text = str(refused.value)
    assert f"a rank holds at least {least / 1e6:.3g} MB with tp=2" in text
    assert "saved for backward of 4 samples; memory= allows" in text
    assert "try tp=4 (at least " in text and "or a batch of " in text
    with pytest.raises(PlanError, match="allow more, or cut the network into pipeline stages"):
        compile_with(memory=100)


def test_a_network_on_one_rank_is_refused_too() -> None:
    module, x = Residual().double(), torch.randn(4, 2, 8, 8, dtype=torch.float64)
    compile_with = partial(parallelize, module, example_inputs=x, input_layout="NCHW", verify="off", profile=CPU)
    assert compile_with(memory=10**9).plan.shards == {}
    with pytest.raises(PlanError, match="(?s)with tp=1: .* try tp="):
        compile_with(memory=150_000)


def test_why_says_that_a_rule_would_hold_too_much() -> None:
    module, x = Residual(16, 16).double(), torch.randn(4, 2, 8, 8, dtype=torch.float64)
    options = {"example_inputs": x, "input_layout": "NCHW", "verify": "off", "profile": CPU}
    graph = parallelize(module, tp=2, **options).compiled.source  # type: ignore[arg-type]
    least = sum(least_bytes(graph, find_lanes(graph, 2), 2, CPU, Choice({}, {})))
    program = parallelize(module, tp=2, memory=int(least) + 8, **options)  # type: ignore[arg-type]
    told = {option.rule: option.verdict for option in program.report().why("blocks.0.conv1").alternatives}
    assert re.fullmatch(r"unavailable: a rank would hold \d+ bytes, more than memory=\d+", told["replicate"]), told


@pytest.mark.parametrize("memory", [0, -1, True, "1 GB"])
def test_memory_is_a_number_of_bytes(memory: object) -> None:
    with pytest.raises(ConfigError, match="memory"):
        parallelize(nn.Linear(2, 2), memory=memory)  # type: ignore[arg-type]


def test_repetitions_of_a_block_are_decided_alike_in_large_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block has the same rules, but for one that is pinned."""
    module = Residual(8, 8, blocks=6).double()
    graph = analysed(module, (torch.randn(4, 2, 8, 8, dtype=torch.float64),))
    assert any(facts.get(node, Block) is not None for node in graph.graph.nodes)
    monkeypatch.setattr(placement_program, "MANY", 1)
    plan = decide(graph, tp=2, pp=1, profile=CPU)
    rules = {tuple(plan.shards[f"blocks.{i}.conv{k}"] for k in (1, 2)) for i in range(6)}
    assert len(rules) == 1
    pinned = Plan(tp=2, shards={"blocks.3.conv1": "row", "blocks.3.conv2": "row"})
    plan = decide(graph, tp=2, pp=1, profile=CPU, pinned=pinned)
    assert plan.shards["blocks.3.conv1"] == plan.shards["blocks.3.conv2"] == "row"
    others = {tuple(plan.shards[f"blocks.{i}.conv{k}"] for k in (1, 2)) for i in (0, 1, 2, 4, 5)}
    assert len(others) == 1
