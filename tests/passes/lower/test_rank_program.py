"""Every lowered program computes what the user's module computes: output, every gradient, every buffer, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from snnpart import simulate
from snnpart.costs import CPU
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from tests import lowering
from tests.lowering import NETS, analysed, assert_parity, compiled, make

TOPOLOGIES = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]


@pytest.mark.parametrize("name", sorted(NETS))
def test_the_networks_fire(name: str) -> None:
    module, inputs, _ = make(name)
    found = lowering.rates(module, inputs)
    steps = len(found) // {"widths": 2, "loop": 1}.get(name, len(found))
    layers = [found[i : i + steps] for i in range(0, len(found), steps)]
    assert all(0.01 < sum(layer) / steps < 0.99 for layer in layers), found


@pytest.mark.parametrize("tp, pp", TOPOLOGIES)
@pytest.mark.parametrize("name", sorted(set(NETS) - {"tied"}))
def test_one_microbatch(name: str, tp: int, pp: int) -> None:
    module, inputs, options = make(name)
    program = compiled(module, inputs, tp=tp, pp=pp, **options)
    assert_parity(module, inputs, program, in_dim=options.get("in_dims", 0))


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("name", ["residual", "widths", "skip"])
def test_microbatches_are_gradient_accumulation(name: str, microbatches: int) -> None:
    """BatchNorm's statistics are per microbatch and its averages move once for each, in order."""
    module, inputs, options = make(name)
    program = compiled(module, inputs, tp=2, pp=2, microbatches=microbatches, **options)
    assert_parity(module, inputs, program, in_dim=options.get("in_dims", 0), microbatches=microbatches)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_tied_weights_stay_together(tp: int) -> None:
    module, inputs, options = make("tied")
    assert_parity(module, inputs, compiled(module, inputs, tp=tp, **options))


def test_another_batch_size_runs_the_same_program() -> None:
    module, inputs, options = make("loop")
    program = compiled(module, tuple(x[:4] for x in inputs), tp=2, pp=2, **options)
    assert_parity(module, inputs, program)


def test_four_stages_hand_skips_on() -> None:
    module, inputs, options = make("skip")
    program = compiled(module, inputs, pp=4, microbatches=2, **options)
    assert_parity(module, inputs, program, microbatches=2)
    carried = [{port.name for port in program.stage(stage, 0).sends} for stage in range(4)]
    assert carried[0] & carried[1] & carried[2], "the first spikes are handed on by the stages between"
    assert all(len(sent) == len(program.stage(stage, 0).sends) for stage, sent in enumerate(carried)), "sent once"


def test_eval_uses_running_statistics() -> None:
    module, inputs, options = make("residual")
    program = compiled(module, inputs, tp=2, pp=2, **options)
    module(*inputs)
    want = copy.deepcopy(module).eval()(*inputs)
    got = simulate.run(program, inputs, values=module.state_dict(), training=False)
    assert torch.allclose(want, got.outputs[0], atol=1e-12)


def test_unused_parameters_are_owned_but_have_no_gradient() -> None:
    module, inputs, options = make("two")
    program = compiled(module, inputs, pp=2, **options)
    owners = [stage for (stage, _), p in program.stages.items() if any(t.name == "unused.weight" for t in p.tensors)]
    (part,) = [t for p in program.stages.values() for t in p.tensors if t.name == "unused.weight"]
    assert len(owners) == 1 and not part.has_gradient and part.requires_grad


def test_the_source_is_left_as_it_was() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    before = str(graph.graph)
    lower(graph, decide(graph, tp=2, pp=2, profile=CPU), profile=CPU)
    assert str(graph.graph) == before and not graph.notes.keys() & {"replicated stem"}


def test_predictions_shrink_with_ranks() -> None:
    module, inputs, options = make("residual")
    whole = compiled(module, inputs, **options).stage(0, 0)
    half = compiled(module, inputs, tp=2, **options).stage(0, 0)
    assert 0 < half.predicted_bytes < whole.predicted_bytes
    assert sum(t.shape.count(0) for t in half.tensors) == 0


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_stages_take_as_long_as_the_network(pp: int) -> None:
    """What a stage receives was paid for where it was made."""
    module, inputs, options = make("residual")
    whole, program = compiled(module, inputs, **options), compiled(module, inputs, pp=pp, **options)
    stages = [program.stage(stage, 0) for stage in range(pp)]
    assert sum(stage.predicted_us for stage in stages) == pytest.approx(whole.stage(0, 0).predicted_us)
    assert all(stage.forward_us > 0 and stage.backward_us > 0 for stage in stages)


def test_more_ranks_than_channels_replicates() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    inputs = (torch.randn(4, 4, dtype=torch.float64),)
    program = compiled(module, inputs, tp=5)
    assert "0" not in program.plan.shards
    assert "fewer than 5 ranks" in program.source.notes["replicated 0"]
    assert_parity(module, inputs, program)
