"""Every lowered program computes what the user's module computes: output, every gradient, every buffer, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import simulate
from snnpart.costs import CPU
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from tests import lowering
from tests.lowering import NETS, analysed, assert_parity, compiled, fire, make

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


@pytest.mark.parametrize("rules", [("column", "row"), ("column", "scatter"), ("row", "column")])
def test_more_ranks_than_channels_leave_some_without(rules: tuple[str, str]) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    inputs = (torch.randn(4, 4, dtype=torch.float64),)
    program = compiled(module, inputs, tp=5, pinned=Plan(tp=5, shards={"0": rules[0], "2": rules[1]}))
    held = [{t.name: t.shape for t in program.stage(0, rank).tensors}["2.weight"] for rank in range(5)]
    inward = [(2, 1)] * 3 + [(2, 0)] * 2
    assert held == (inward if rules[1] != "column" else [(1, 3)] * 2 + [(0, 3)] * 3)
    assert_parity(module, inputs, program)


def test_a_single_channel_stays_whole() -> None:
    module = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 2, 3)).double()
    inputs = (torch.randn(4, 1, 6, 6, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2)
    assert "one channel only" in program.source.notes["replicated 0"]
    assert_parity(module, inputs, program)


class Narrow(nn.Module):
    """Layers of two and three channels: what a rank without channels must get through."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.deep = nn.Conv2d(3, 2, 3, padding=1, groups=1)
        self.each, self.back = nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.ConvTranspose2d(3, 2, 2, stride=2)
        self.shape, self.slope = nn.GroupNorm(1, 3), nn.PReLU(3)
        self.head = nn.Linear(2 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = fire(self.norm(self.stem(x)))
        b = F.max_pool2d(self.slope(self.shape(self.each(a))), 2)
        c = F.interpolate(b, scale_factor=2) * a + F.avg_pool2d(self.back(b), 2).repeat_interleave(2, 2).mean()
        d = F.adaptive_avg_pool2d(fire(self.deep(torch.cat([c[:, :, 1:], c[:, :, :1]], 2)) - 0.2), 2)
        e = d.flatten(1) + F.dropout(d, 0.0).reshape(d.shape[0], -1)
        return self.head(e).softmax(-1)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("rule", ["column", "row", "scatter"])
def test_layers_with_fewer_channels_than_ranks(tp: int, rule: str) -> None:
    torch.manual_seed(1)
    module, inputs = Narrow().double(), (torch.randn(4, 2, 4, 4, dtype=torch.float64),)
    program = compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards={"stem": "column", "deep": rule}))
    assert program.plan.shards["norm"] == "shard"
    assert_parity(module, inputs, program)
