"""The placement decision: best by the cost model, honouring pins, sensible where memory is asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from snnpart.costs import CPU, H200, Link, MachineProfile
from snnpart.errors import PlanError
from snnpart.pass_manager import PassManager
from snnpart.passes.decide import decide
from snnpart.passes.decide.placement import DecidePlacement
from snnpart.passes.decide.stages import DecideStages
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from snnpart.verify import verify
from tests.lowering import analysed, assert_parity, compiled, make

FAST = replace(CPU, links={axis: Link(1e11, 0.5) for axis in ("tp", "pp", "dp")}, launch_us=0.01)


def _rules(plan: Plan, *paths: str) -> list[str | None]:
    return [plan.shards.get(path) for path in paths]


@pytest.mark.parametrize("profile", [CPU, FAST, H200], ids=["cpu", "fast", "h200"])
@pytest.mark.parametrize("objective", ["time", "max"])
def test_no_other_choice_of_rules_is_faster(profile: MachineProfile, objective: str) -> None:
    """Against all rules of three layers, timed by adding up the costs of the lowered program."""
    module = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)
    )
    graph = analysed(module.double(), (torch.randn(4, 2, 12, 12, dtype=torch.float64),))

    def time(shards: dict[str, str]) -> float:
        return lower(graph, Plan(tp=2, shards=shards), profile=profile).stage(0, 0).predicted_us

    allowed = ("column", "row", "scatter", *(["replicate"] if objective == "time" else []))
    best = min(time(dict(zip("035", rules))) for rules in itertools.product(allowed, repeat=3))
    found = decide(graph, tp=2, pp=1, profile=profile, objective=objective)  # type: ignore[arg-type]
    assert time(found.shards) == pytest.approx(best, rel=1e-6)


def test_a_chain_gathers_nothing() -> None:
    """Each layer reads the slices that the one before made, or the whole of what it summed."""
    module = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())]).double()
    graph = analysed(module, (torch.randn(64, 8, dtype=torch.float64),))
    plan = decide(graph, tp=2, pp=1, profile=CPU)
    rules = _rules(plan, "0", "2", "4", "6")
    for made, read in itertools.pairwise(rules):
        assert (made in ("column", "scatter")) == (read in ("row", "scatter")), rules


def test_slow_links_make_one_rank_the_fastest() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    assert decide(graph, tp=2, pp=1, profile=CPU, objective="time").shards == {}
    assert len(decide(graph, tp=2, pp=1, profile=CPU).shards) >= 6


def test_uneven_widths_slice_what_belongs_to_the_channels() -> None:
    """Case A12: 7 and 5 features over 2 ranks, thresholds cut with them, the decay whole."""
    module, inputs, options = make("widths")
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"0": "column", "2": "column"}), **options)
    shapes = [{t.name: t.shape for t in program.stage(0, rank).tensors} for rank in range(2)]
    assert [s["0.weight"] for s in shapes] == [(4, 4), (3, 4)]
    assert [s["1.th"] for s in shapes] == [(4,), (3,)] and [s["3.th"] for s in shapes] == [(3,), (2,)]
    assert [s["1.w"] for s in shapes] == [(), ()]
    assert_parity(module, inputs, program, in_dim=1)


@pytest.mark.parametrize("rules", list(itertools.product(["column", "row", "scatter", "replicate"], repeat=2)))
def test_any_pinned_rules_compute_the_same(rules: tuple[str, str]) -> None:
    module, inputs, options = make("residual")
    pinned = Plan(tp=2, shards={"blocks.0.conv1": rules[0], "blocks.0.conv2": rules[1]})
    program = compiled(module, inputs, tp=2, pinned=pinned, **options)
    expected = [None if rule == "replicate" else rule for rule in rules]
    assert _rules(program.plan, "blocks.0.conv1", "blocks.0.conv2") == expected
    assert_parity(module, inputs, program)


def test_a_norm_can_be_pinned_whole_behind_a_sharded_layer() -> None:
    module, inputs, options = make("residual")
    pinned = Plan(tp=2, shards={"blocks.0.conv1": "column", "blocks.0.norm1": "replicate"})
    program = compiled(module, inputs, tp=2, pinned=pinned, **options)
    assert program.plan.shards.get("blocks.0.norm1") is None
    assert_parity(module, inputs, program)


def test_impossible_pins_name_path_rule_and_choices() -> None:
    module, inputs, options = make("unet")
    graph = analysed(module, inputs, **options)
    with pytest.raises(PlanError, match=r"'down1': it cannot be sharded by 'group'") as refused:
        decide(graph, tp=2, pp=1, pinned=Plan(tp=2, shards={"down1": "group"}), profile=CPU)
    assert refused.value.choices == ("column", "row", "scatter", "replicate")
    with pytest.raises(PlanError, match=r"plan.shards names 'nobody', which no operation of the network has"):
        decide(graph, tp=2, pp=1, pinned=Plan(tp=2, shards={"nobody": "row"}), profile=CPU)
    with pytest.raises(PlanError, match=r"'depth': it cannot be sharded by 'row'"):
        decide(graph, tp=2, pp=1, pinned=Plan(tp=2, shards={"depth": "row"}), profile=CPU)


def test_what_stays_replicated_is_noted_with_the_reason() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 3)).double()
    program = compiled(
        module, (torch.randn(5, 4, dtype=torch.float64),), tp=2, pinned=Plan(tp=2, shards={"0": "column"})
    )
    assert "it works along the sharded dim" in program.source.notes["replicated 1"]
    assert "module '1'" in program.source.notes["replicated 1"]


def test_the_decisions_run_as_passes_and_leave_a_placed_graph() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    records = PassManager((DecidePlacement(2, CPU), DecideStages(2, CPU, 2))).run(graph)
    assert [record.name for record in records] == ["decide-placement", "decide-stages"]
    verify(graph, "placed")
