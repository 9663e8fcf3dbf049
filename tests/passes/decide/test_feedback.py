"""Recurrent weights: written out over time, their matrices are shared by tp ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from snnpart import ops, parallelize, simulate
from snnpart.api import ParallelProgram
from snnpart.ops_time import Loop
from snnpart.passes.decide.constraints import WRITTEN_OUT
from snnpart.program import CompiledProgram
from tests.lowering import assert_gradients, near, reference
from tests.passes.rewrite.fold_time.nets import RandomLoop, Shape
from tests.passes.rewrite.fold_time.parity import active
from tests.passes.rewrite.fold_time.test_random_nets import SHAPES
from tests.zoo_models import Recurrent

FRAMES = (5, 4, 6)


def _float64(x: Tensor) -> Tensor:
    """The surrogate's spikes in the dtype of the membrane."""
    return (x > 0).to(x) + torch.sigmoid(4 * x) - torch.sigmoid(4 * x).detach()


class Cells(nn.Module):
    """A recurrent cell of snnTorch between two layers; its spikes and `states` tensors are passed by hand."""

    def __init__(self, cell: nn.Module, states: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(6, 7), nn.Linear(7, 3)
        self.cell, self.states = cell, states

    def forward(self, x: Tensor) -> Tensor:
        state, record = [x.new_zeros(x.shape[0], 7) for _ in range(1 + self.states)], []
        for t in range(x.shape[1]):
            state = list(self.cell(self.fc(x[:, t]), *state))
            record.append(self.out(state[0]) + self.out(state[-1]))
        return torch.stack(record, 1)


def _rleaky() -> nn.Module:
    snn = pytest.importorskip("snntorch")
    return Cells(snn.RLeaky(beta=0.8, linear_features=7, threshold=0.2, spike_grad=_float64), 1)


def _rsynaptic() -> nn.Module:
    snn = pytest.importorskip("snntorch")
    return Cells(snn.RSynaptic(alpha=0.6, beta=0.8, linear_features=7, threshold=0.2, spike_grad=_float64), 2)


class Contained(nn.Module):
    """SpikingJelly's container: the output comes back through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = pytest.importorskip("spikingjelly.activation_based.layer")
        from spikingjelly.activation_based import neuron

        self.fc, self.out = nn.Linear(6, 7), nn.Linear(7, 3)
        self.back = layer.LinearRecurrentContainer(neuron.IFNode(v_threshold=0.3), 7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.out(self.back(self.fc(x[:, t]))) for t in range(x.shape[1])], 1)


NETS: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "by hand": (Recurrent, "back"),
    "RLeaky": (_rleaky, "cell.recurrent"),
    "RSynaptic": (_rsynaptic, "cell.recurrent"),
    "container": (Contained, "back.rc"),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(1)
    return NETS[name][0]().double()


def shared(net: nn.Module, *, steps: int = 4, **how: Any) -> tuple[tuple[Tensor, ...], ParallelProgram]:
    torch.manual_seed(2)
    x = torch.rand(FRAMES[0], steps, FRAMES[2], dtype=torch.float64) * 2
    return (x,), parallelize(net, example_inputs=x, input_layout="NTF", **how)


def assert_parity(net: nn.Module, inputs: tuple[Tensor, ...], program: CompiledProgram) -> None:
    """Outputs and every gradient, to 1e-9; the recurrent layer fires and every parameter learns."""
    ran, (want,) = reference(net, inputs, 0, 1)
    simulated = simulate.run(program, inputs, training=True)
    near(want, simulated.outputs[0], "output")
    weights = torch.randn_like(want)
    for out in (want, simulated.outputs[0]):
        (out * weights).sum().backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.any() for p in ran.parameters())
    assert_gradients(ran, simulated.gradients())


def fires(net: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether the layer that feeds back gives some spikes, and not at every place."""
    rates: list[float] = []

    def seen(module: nn.Module, given: Any, out: Any) -> None:
        rates.append(float((out[0] if isinstance(out, tuple) else out).detach().mean()))

    layer = next(getattr(net, name) for name in ("cell", "lif", "back") if hasattr(net, name))
    hook = layer.register_forward_hook(seen)
    reference(net, inputs, 0, 1)
    hook.remove()
    return 0.01 < sum(rates) / len(rates) < 0.99


def loops(program: CompiledProgram) -> int:
    return sum(isinstance(node.target, Loop) for node in program.source.graph.nodes)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", sorted(NETS))
def test_the_matrix_that_feeds_back_is_shared(name: str, tp: int) -> None:
    net, path = network(name), NETS[name][1]
    inputs, program = shared(net, tp=tp)
    rules = {layer: rule for layer, rule in program.plan.shards.items() if layer.startswith(path)}
    assert rules and "replicate" not in rules.values(), program.plan.shards
    assert "4 steps written out" in program.compiled.source.notes["unfold-feedback"]
    sizes = {t.name: t.dim for t in program.compiled.stage(0, 0).tensors if t.name.startswith(path)}
    assert any(dim is not None for dim in sizes.values()), sizes
    assert fires(net, inputs)
    assert_parity(net, inputs, program.compiled)


def test_a_collective_a_step_brings_the_spikes_back() -> None:
    _, program = shared(network("by hand"), tp=2, shard={"fc": "column", "back": "column", "out": "row"})
    moved = [n for n in program.compiled.stage(0, 0).graph.nodes if n.target in ops.COLLECTIVES]
    assert sum(n.target is ops.all_gather for n in moved) == 3, "no spikes come back at the first of four steps"


@pytest.mark.parametrize(
    "how", [{"shard": "time"}, {"shard": {"back": "replicate"}}, {"steps": WRITTEN_OUT + 1}, {"fold": 2}]
)
def test_a_loop_stays_where_its_matrix_is_not_to_be_shared(how: dict[str, Any]) -> None:
    net = network("by hand")
    inputs, program = shared(net, tp=2, **how)
    assert loops(program.compiled) == 1 and "unfold-feedback" not in program.compiled.source.notes
    assert program.plan.shards.get("back", "replicate") == "replicate"
    answer = program.report().why("back")
    assert answer.chosen == "replicate"
    assert any("it is inside a time loop" in item.verdict for item in answer.alternatives)
    assert_parity(net, inputs, program.compiled)


def test_the_plan_says_whether_a_loop_is_written_out() -> None:
    """For another number of steps too, so that every graph of a network has the same slices."""
    net = network("by hand")
    _, program = shared(net, tp=2)
    _, whole = shared(net, tp=2, shard="time")
    longer, again = shared(net, tp=2, plan=program.plan, steps=7)
    assert again.plan.shards["back"] == program.plan.shards["back"] and loops(again.compiled) == 0
    assert_parity(net, longer, again.compiled)
    _, kept = shared(net, tp=2, plan=whole.plan)
    assert loops(kept.compiled) == 1


def test_one_rank_and_stages_keep_their_loops() -> None:
    for how in ({}, {"pp": 2}):
        _, program = shared(network("by hand"), **how)
        assert loops(program.compiled) == 1


class NormedBack(nn.Module):
    """What comes back is normed, with the statistics of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.back, self.out = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        v, s, record = 0.0, x.new_zeros(x.shape[0], 7), []
        for t in range(x.shape[1]):
            v = 0.5 * v + self.fc(x[:, t]) + self.norm(self.back(s))  # type: ignore[assignment]
            s = _float64(v - 0.3)  # type: ignore[operator]
            v = v - s.detach()  # type: ignore[assignment]
            record.append(self.out(s))
        return torch.stack(record, 1)


def test_a_norm_beside_the_matrix_that_feeds_back() -> None:
    net = NormedBack().double()
    inputs, program = shared(net, tp=2)
    assert loops(program.compiled) == 0 and program.plan.shards["back"] != "replicate"
    assert_parity(net, inputs, program.compiled)


LAYOUT = {"constant": "NF", "time-first": "TNF", "unbind": "TNF"}


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(shape=SHAPES, more=st.integers(1, 3), tp=st.sampled_from([2, 3, 4]))
def test_random_loops_with_feedback(shape: Shape, more: int, tp: int) -> None:
    """The program is compared with the module as it compiles: outputs, gradients, buffers."""
    layers = (replace(shape.layers[0], feedback=True), *shape.layers[1:])
    shape = replace(shape, layers=layers, steps=shape.steps + more)
    torch.manual_seed(len(layers) + shape.steps)
    net = active(RandomLoop(shape))
    layout = LAYOUT.get(shape.source, "NTF")
    program = parallelize(net, example_inputs=net.input(4), input_layout=layout, tp=tp, verify="full")
    for i, layer in enumerate(layers):
        if layer.feedback:
            assert program.plan.shards[f"backs.{i}"] in ("column", "row", "scatter"), program.plan.shards
