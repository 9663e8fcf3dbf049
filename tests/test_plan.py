"""The plan as data: read back, edited, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from snnpart.api import parallelize
from snnpart.errors import ConfigError, PlanError, SnnpartError
from snnpart.plan import Plan
from tests.nets import Net

INPUTS = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_plan_saved_edited_and_given_back(tmp_path: Path) -> None:
    first = parallelize(Net(), tp=2, pp=2, example_inputs=INPUTS, verify="off").plan
    edited = json.loads(first.to_json())
    edited["stages"] = {"conv1": 0, "norm1": 0, "conv2": 1, "norm2": 1, "head": 1}
    edited["shards"] = {"conv1": "replicate", "conv2": "column"}
    edited["microbatches"] = 4
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited))
    again = parallelize(Net(), plan=path, example_inputs=INPUTS, verify="off").plan
    assert (again.tp, again.pp, again.microbatches) == (2, 2, 4)
    assert again.stages["conv1"] == 0 and again.stages["conv2"] == 1
    assert again.shards["conv2"] == "column" and again.shards.get("conv1") in (None, "replicate")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "JSON list, not an object"),
        ('{"a": 1', "not JSON"),
        ('{"version": 1, "colour": 3}', "unknown fields"),
        ('{"version": 7}', "version 7 is not 1"),
        ('{"version": 1, "tp": "2"}', "tp='2' is not a positive integer"),
        ('{"version": 1, "microbatches": 0}', "microbatches=0 is not a positive integer"),
        ('{"version": 1, "channels_last": "nchw"}', "channels_last='nchw' is not known"),
        (
            '{"version": 1, "neuron_dtype": "fp8"}',
            "neuron_dtype='fp8' is not known\n  valid: fp32, bf16, fp16, float32,",
        ),
        ('{"version": 1, "stages": {"a": "x"}}', r"stages holds \{'a': 'x'\}"),
        ('{"version": 1, "shards": ["a"]}', "shards is a list, not an object"),
        ('{"version": 1, "stages": {"a": 1}}', r"stages \{'a': 1\} are outside 0..0"),
    ],
)
def test_a_damaged_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(SnnpartError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "asked", [{"tp": 4}, {"pp": 3}, {"dp": "fsdp2"}, {"schedule": "gpipe"}, {"microbatches": 3}], ids=lambda a: str(a)
)
def test_arguments_that_contradict_the_plan_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="but the plan says"):
        parallelize(Net(), plan=Plan(tp=2, pp=2, microbatches=2), **asked)


def test_a_misspelt_path_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan.stages names \['conv3'\]"):
        parallelize(Net(), plan=Plan(pp=2, stages={"conv3": 1}), example_inputs=INPUTS, verify="off")
    with pytest.raises(PlanError, match="plan.shards names 'conv3'"):
        parallelize(Net(), plan=Plan(tp=2, shards={"conv3": "row"}), example_inputs=INPUTS, verify="off")
