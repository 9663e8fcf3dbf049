"""The report's data, text and JSON, from a program made by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from snnpart import parallelize
from snnpart.costs import CPU, H200, Link, MachineProfile
from snnpart.graph import Assumption
from snnpart.plan import Plan
from snnpart.report import Report, build
from snnpart.report.layers import modules_of
from snnpart.report.schema import schema
from snnpart.report.sections import duration, number, size
from tests.report.example import compiled
from tests.zoo import ZOO

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Gate:
    largest: float = 3e-12
    silent: tuple[str, ...] = ("block.lif",)


@pytest.fixture
def report() -> Report:
    return build(compiled(), Gate())


def test_stages_hold_what_the_program_holds(report: Report) -> None:
    first, second = report.stages
    assert (first.modules, second.modules) == (("block",), ("head",))
    assert first.parameters == 8 * 3 * 9 + 8 * 8 * 9 and first.parameters_per_rank == first.parameters // 2
    assert (first.predicted_us, first.balance, second.balance) == (300.0, 1.0, 0.5)
    assert first.peak_bytes == 3 << 20 and first.flops > second.flops > 0


def test_memory_is_counted_by_rank(report: Report) -> None:
    """Saved values: as many microbatches as are in flight at one time, which the schedule says."""
    first, second = report.memory
    assert (first.rank, first.stages, second.stages) == (0, (0,), (1,))
    assert (first.parameters, first.gradients, first.optimizer, first.buffers) == (1 << 18, 1 << 18, 1 << 19, 0)
    assert (first.saved, first.total, first.limit) == (1 << 20, 2 << 20, None)
    assert "Memory of a pipeline rank in training" in report.text()


def test_schedule_is_a_grid_with_its_bubble(report: Report) -> None:
    assert report.schedule is not None
    assert report.schedule.lines[1].startswith("rank 1 |     1F0")
    assert 0 < report.schedule.bubble < 1 and 0 < report.schedule.bubble_of_equal_stages < 1
    assert "ranks wait" in report.text() and report.schedule.lines[0] in report.text()


def test_the_gain_of_sharing_is_predicted_against_every_layer_whole() -> None:
    """By the machine's profile; with shard="time" no plan is slower than none, with "max" one may be."""
    module, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(32, 64)
    program = parallelize(module, tp=2, example_inputs=x, verify="off", profile=CPU)
    said = program.report().topology
    alone = parallelize(module, example_inputs=x, verify="off", profile=CPU).report().topology
    assert said.unsharded_us == pytest.approx(alone.predicted_us) and alone.unsharded_us == alone.predicted_us
    assert said.predicted_us == max(program.compiled.stage(0, rank).predicted_us for rank in range(2))
    ratio = said.unsharded_us / said.predicted_us
    assert f"unsharded ({ratio:.2f} times)" in program.report().text()
    fastest = parallelize(module, tp=2, example_inputs=x, verify="off", profile=CPU, shard="time").report().topology
    assert fastest.predicted_us <= fastest.unsharded_us < said.predicted_us


@pytest.mark.parametrize("name", ["small_sew-m", "spikformer", "qkformer"])
def test_the_fastest_plan_with_fused_kernels_is_not_slower_than_none(name: str) -> None:
    """What a plan is chosen by and what its program is predicted to take count the same kernels: views that a layout
    brings in cost nothing, and neurons that are to be fused one kernel. Layers go by what they do."""
    model, quick = ZOO[name], replace(H200, links={"tp": Link(3e11, 0.1)}, launch_us=0.1)
    layout = "TNCHW" if model.in_dims else "NCHW"

    def said_of(samples: int, profile: MachineProfile) -> Report:
        shape = list(model.shapes[0])
        shape[model.in_dims] = samples
        options: dict[str, Any] = {"tp": 2, "fuse": True, "channels_last": True, "verify": "off", "shard": "time"}
        x = torch.randn(shape)
        return parallelize(model.factory(), example_inputs=x, input_layout=layout, profile=profile, **options).report()

    said = said_of(256, quick)
    assert said.topology.predicted_us <= said.topology.unsharded_us
    done = {row.operation for row in said.sharded}
    assert {"conv2d", "LIFNode"} <= done and not done & {"", "later", "unsqueeze", "flatten"}
    assert not said_of(2, H200).sharded, "two samples do not pay for a collective"


def test_split_layers_name_rule_pieces_and_bytes(report: Report) -> None:
    rows = {row.module: row for row in report.sharded}
    assert set(rows) == {"block.conv1", "block.conv2", "block.lif"}
    assert (rows["block.conv1"].rule, rows["block.conv1"].tensors) == ("column", ("weight: S(0) 4+4",))
    assert rows["block.conv2"].collectives == ("all_reduce",)
    assert rows["block.conv2"].bytes_per_step == 2 * 8 * 4 * 4 * 4
    assert rows["block.conv1"].bytes_per_step == 2 * 3 * 8 * 8 * 4
    assert rows["block.conv1"].operation == "conv2d" and rows["block.lif"].operation == "Neuron"


def test_collectives_say_the_direction(report: Report) -> None:
    moves = {row.operation: (row.forward_bytes, row.backward_bytes) for row in report.collectives}
    assert moves == {"grad_all_reduce": (0, 1536), "all_reduce": (1024, 0)}


def test_boundary_has_values_and_bytes(report: Report) -> None:
    (boundary,) = report.boundaries
    assert (boundary.source, boundary.target, boundary.forward_bytes, boundary.backward_bytes) == (0, 1, 1024, 1024)
    assert boundary.values[0].shape == (2, 8, 4, 4)


def test_replicated_layer_says_why(report: Report) -> None:
    head, other = report.replicated
    assert (head.module, head.operation, head.reason) == ("head", "linear", "10 outputs: <too few> to split")
    assert (other.module, other.reason) == ("sort_1", "no rule for sort")


def test_without_tp_nothing_is_called_replicated() -> None:
    program = compiled()
    program = replace(program, plan=replace(program.plan, tp=1, shards={}))
    assert build(program).replicated == ()


def test_text_has_every_section(report: Report) -> None:
    text = report.text()
    for part in (
        "tp=2 pp=2",
        "column",
        "weight: S(0) 4+4",
        "0 -> 1",
        "spare.weight",
        "self.deep is <True> [net.py:12]",
        "head",
        "<too few>",
        "canonicalize",
        "the microbatch count was raised",
        "Neuron (hand-written, 1 call(s) a forward): block.lif",
        "mem (starts as None): cell",
        "largest: 3e-12",
        plan_line(report),
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 120


def plan_line(report: Report) -> str:
    return f"plan {compiled().plan.fingerprint}"


def test_a_network_without_neurons_says_so() -> None:
    program = compiled()
    found = (Assumption("neuron", "no spiking neuron was found"),)
    bare = replace(program, source=replace(program.source, leaves={}, states=(), assumptions=found))
    assert "none: this network has no spiking neuron" in build(bare).text()
    local = replace(program, source=replace(program.source, leaves={}, states=(), assumptions=()))
    assert "none: its neurons keep none on a module between forward calls" in build(local).text()


def test_gate_off_is_said() -> None:
    assert "off: the program was not compared" in build(compiled()).text()


def test_json_follows_the_documented_schema(report: Report) -> None:
    documented = json.loads((ROOT / "docs/report-schema.json").read_text())
    assert documented == schema(), "run: python -m snnpart.report.schema > docs/report-schema.json"
    for gate in (Gate(), None):
        check(json.loads(build(compiled(), gate).to_json()), documented, "$")


def test_schema_check_can_fail(report: Report) -> None:
    broken = json.loads(report.to_json())
    broken["stages"][0]["balance"] = "all"
    with pytest.raises(AssertionError, match=r"\$\.stages\[\]\.balance"):
        check(broken, schema(), "$")


TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def check(value: Any, rule: dict[str, Any], where: str) -> None:
    """Does `value` follow the part of JSON Schema that the report uses?"""
    if "const" in rule:
        assert value == rule["const"], where
    elif "anyOf" in rule:
        kinds = [TYPES.get(option.get("type"), (dict, list)) for option in rule["anyOf"]]
        assert any(isinstance(value, kind) for kind in kinds), where
    elif rule["type"] == "array":
        for item in value:
            check(item, rule["items"], f"{where}[]")
    elif rule["type"] == "object":
        assert isinstance(value, dict), where
        if "properties" in rule:
            assert set(value) == set(rule["required"]), where
            for name, inner in rule["properties"].items():
                check(value[name], inner, f"{where}.{name}")
    else:
        assert isinstance(value, TYPES[rule["type"]]), where


@pytest.mark.parametrize("ending, start", [("html", "<!doctype html>"), ("json", "{"), ("txt", "Net: ")])
def test_write_follows_the_ending(report: Report, tmp_path: Path, ending: str, start: str) -> None:
    path = report.write(tmp_path / "deep" / f"report.{ending}")
    assert path.read_text().startswith(start)


def test_modules_are_named_by_the_highest_path_that_is_whole() -> None:
    stages = {"stem.conv": 0, "layer1.0.conv": 0, "layer1.1.conv": 0, "layer2.0.conv": 0, "layer2.1.conv": 1, "fc": 1}
    plan = Plan(pp=2, stages=stages)
    assert modules_of(plan.stages, 0) == ("stem", "layer1", "layer2.0")
    assert modules_of(plan.stages, 1) == ("layer2.1", "fc")
    assert modules_of(plan.stages, 0, ["layer1.1.conv", "stem.conv", "fc"]) == ("layer1", "stem", "layer2.0")


def test_units() -> None:
    assert [duration(us) for us in (12.3, 3884.2, 3_884_197)] == ["12.3 µs", "3.88 ms", "3.88 s"]
    assert [size(n) for n in (12, 1536, 3 << 20, 5 << 30)] == ["12 B", "1.5 KiB", "3.0 MiB", "5.00 GiB"]
    assert [number(n) for n in (7, 11_200_000, 3.1e12)] == ["7", "11.20 M", "3.10 T"]


def test_the_report_says_how_far_a_loop_folded_and_what_the_gate_saw() -> None:
    model, inputs = ZOO["handwritten_lif"].build()
    report = parallelize(model, example_inputs=inputs).report()
    folded = [text for text in report.notices if text.startswith("fold-time: ")]
    assert folded and "operations in one call each" in folded[0]
    assert report.gate is not None
    assert set(report.gate) == {"traced", "program", "unverified", "precision", "seconds"}
    assert report.gate["traced"]["flips"] == 0
    assert folded[0] in report.text()
