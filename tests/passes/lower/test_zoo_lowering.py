"""Networks of the frameworks, sharded and cut, against the user's module: output, every gradient, buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart import facts, frameworks, simulate
from snnpart.facts import Placement
from snnpart.program import CompiledProgram
from tests.lowering import compiled
from tests.zoo import ZOO, Model

QUICK = (
    "small_sew-m",
    "small_sew-s",
    "plif_mnist-m",
    "spikformer",
    "snntorch_leaky",
    "snntorch_rleaky",
    "snntorch_sconv2dlstm",
    "norse_sequential",
    "norse_lsnn",
    "sinabs_from_model",
    "sinabs_layers",
    "unet",
    "recurrent",
)
SEVERAL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.all) for name in sorted(ZOO)]
LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.mark.parametrize("tp, pp", [(2, 2), pytest.param(3, 1, marks=pytest.mark.all)])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_network_of_the_zoo(name: str, tp: int, pp: int) -> None:
    model = ZOO[name]
    pytest.importorskip(model.needs)
    module, inputs = model.build()
    program = compiled(module, inputs, tp=tp, pp=pp, **model.dims)
    torch.manual_seed(5)
    got = simulate.run(program, inputs, training=True)
    frameworks.reset_state(module)
    torch.manual_seed(5)
    want = [t for t in pytree.tree_leaves(model.call(module, inputs)) if isinstance(t, Tensor)]
    cotangents = [torch.randn_like(value) for value in want]
    for outputs in (want, got.outputs):
        torch.autograd.backward(*zip(*((o, w) for o, w in zip(outputs, cotangents, strict=True) if o.requires_grad)))
    limit = LIMIT[model.dtype]
    for a, b in zip(want, got.outputs):
        assert float((a - b).detach().abs().max()) <= limit * max(1.0, float(a.detach().abs().max()))
    _assert_gradients(module, got, limit)


def _assert_gradients(module: torch.nn.Module, got: simulate.SimulatedRun, limit: float) -> None:
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    gradients, buffers = got.gradients(), got.buffers()
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        found = gradients[name]
        assert found is not None and float((grad - found).abs().max()) <= limit * scale, name
    for name, buffer in module.named_buffers():
        if "running" in name or "num_batches" in name:
            assert torch.allclose(buffer.double(), buffers[name].double(), atol=limit), name


@pytest.mark.parametrize("name", ["small_sew-m", "spikformer"])
def test_most_of_a_network_is_sharded(name: str) -> None:
    model: Model = ZOO[name]
    pytest.importorskip(model.needs)
    module, inputs = model.build()
    program = compiled(module, inputs, tp=2, **model.dims)
    assert _weights_of(program, 0) < 0.7 * sum(p.numel() for p in module.parameters())
    assert any(rule == "row" for rule in program.plan.shards.values())


def _weights_of(program: CompiledProgram, rank: int) -> int:
    return sum(int(torch.Size(t.shape).numel()) for t in program.stage(0, rank).tensors if t.kind == "parameter")


def test_a_learned_scalar_of_a_sharded_neuron_layer_sums_its_gradient_over_ranks() -> None:
    """PLIF's time constant is whole on every rank, its gradient a sum over all channels."""
    model: Model = ZOO["plif_mnist-m"]
    pytest.importorskip(model.needs)
    module, inputs = model.build()
    program: Any = compiled(module, inputs, tp=2, **model.dims)
    sharded = {
        str(node.target)
        for node in program.source.graph.nodes
        if node.op == "call_module" and facts.need(node, Placement).rule == "shard"
    }
    learned = {t.name for t in program.stage(0, 0).tensors if t.partial_gradient}
    assert sharded and learned == {f"{path}.w" for path in sharded}


def test_a_neuron_layer_whose_final_state_is_an_output() -> None:
    """Norse's layers over time return their state without the time dim: its channels lie in another dim."""
    norse = pytest.importorskip("norse.torch")

    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
            self.net = norse.SequentialState(norse.Lift(layers[0]), norse.LIF(), norse.Lift(layers[1]), norse.LI())

        def forward(self, x: Tensor) -> Any:
            return self.net(x * 20)

    torch.manual_seed(0)
    module, inputs = Stateful().double(), (torch.randn(5, 4, 6, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2, pp=2, in_dims=1)
    got = simulate.run(program, inputs, training=True)
    want = [t for t in pytree.tree_leaves(module(*inputs)) if isinstance(t, Tensor)]
    assert len(want) == len(got.outputs) == 5
    for a, b in zip(want, got.outputs):
        assert torch.allclose(a, b, atol=1e-9)
