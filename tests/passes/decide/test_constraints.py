"""The user's constraints on sharding, and the answer to "why"."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from snnpart import parallelize
from snnpart.costs import CPU
from snnpart.errors import ConfigError, PlanError
from snnpart.passes.decide import decide
from snnpart.passes.decide.why import why
from tests.lowering import Residual, analysed, make


def test_patterns_pin_the_layers_that_match_and_the_rest_is_decided() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    plan = decide(
        graph, tp=2, pp=1, profile=CPU, shard={"blocks.*": "column", "blocks.1.conv2": "row", "head": "replicate"}
    )
    assert [plan.shards.get(f"blocks.{i}.conv{j}") for i in (0, 1) for j in (1, 2)] == ["column"] * 3 + ["row"]
    assert plan.shards.get("head") is None and plan.shards["stem"] in ("column", "row")


def test_a_whole_module_can_be_named_by_its_path() -> None:
    module, inputs, options = make("residual")
    plan = decide(analysed(module, inputs, **options), tp=2, pp=1, profile=CPU, shard={"blocks.0": "replicate"})
    assert not [path for path in plan.shards if path.startswith("blocks.0.conv")]
    assert "blocks.1.conv1" in plan.shards


def test_refusals_name_what_is_wrong() -> None:
    module, inputs, options = make("unet")
    graph = analysed(module, inputs, **options)

    def asked(tp: int = 2, **shard: str) -> None:
        decide(graph, tp=tp, pp=1, profile=CPU, shard=shard)

    with pytest.raises(PlanError, match=r"shard= names 'dwn1', which no layer of the network matches") as refused:
        asked(dwn1="column")
    assert "down1" in refused.value.choices
    with pytest.raises(PlanError, match=r"shard={'down1': 'columns'} asks for a rule that is not known"):
        asked(down1="columns")
    with pytest.raises(PlanError, match=r"'depth': it cannot be sharded by 'row'"):
        asked(depth="row")
    with pytest.raises(ConfigError, match="shard='fast' is not known"):
        parallelize(module, tp=2, shard="fast")  # type: ignore[arg-type]


def test_why_lists_the_alternatives_with_their_costs() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    plan = decide(graph, tp=2, pp=1, profile=CPU)
    answer = why(graph, plan, "blocks.0.conv1", profile=CPU)
    assert {item.rule for item in answer.alternatives} == {"column", "row", "scatter", "replicate"}
    chosen = next(item for item in answer.alternatives if item.rule == answer.chosen)
    other = next(item for item in answer.alternatives if item.rule not in (answer.chosen, "replicate"))
    assert chosen.verdict == "chosen" and chosen.step_us is not None and other.step_us is not None
    assert other.step_us >= chosen.step_us and "lost by" in other.verdict and "collectives" in other.verdict
    whole = next(item for item in answer.alternatives if item.rule == "replicate")
    assert 'shard="max" shards what can be' in whole.verdict, "links as slow as these make one rank the fastest"


def test_why_says_what_makes_a_rule_unavailable() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    graph = analysed(module, (torch.randn(3, 4, dtype=torch.float64),))
    plan = decide(graph, tp=4, pp=1, profile=CPU)
    last = {item.rule: item for item in why(graph, plan, "2", profile=CPU).alternatives}
    assert last["column"].step_us is None and "there is one channel only" in last["column"].verdict
    with pytest.raises(PlanError, match="no operation of the network has the path 'lost'") as refused:
        why(graph, plan, "lost", profile=CPU)
    assert "2" in refused.value.choices


def test_the_public_door_takes_constraints_and_its_report_explains() -> None:
    torch.manual_seed(3)
    module = Residual().double()
    x = 2 * torch.randn(4, 2, 8, 8, dtype=torch.float64)
    program = parallelize(module, tp=2, example_inputs=x, shard={"blocks.*": "column"}, verify="off", profile=CPU)
    assert program.plan.shards["blocks.1.conv2"] == "column"
    answer = program.report().why("blocks.1.conv2")
    text = str(answer)
    assert text.startswith("blocks.1.conv2: column\n") and "shard= asks for 'column'" in text and "replicate" in text
    assert parallelize(module, tp=2, example_inputs=x, shard="time", verify="off", profile=CPU).plan.shards == {}
    assert '"_explain"' not in program.report().to_json()
