"""What a layer that is kept whole holds is what it was seen to hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, frameworks
from snnpart.facts import LeafMemory
from snnpart.passes.analyze import leaf_memory
from snnpart.passes.analyze.cost import AnalyzeCost
from snnpart.passes.analyze.leaf_memory import measured
from snnpart.trace import trace

X = torch.zeros(4, 1, 8)


class Square(nn.Module):
    """Keeps its input and nothing else; what it computes on the way goes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x + (x.detach() + 1).detach() * 0


class Exp(nn.Module):
    """Keeps its result, which is no memory of its own; the sine keeps its input, which is."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).sin().exp()


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not on this input")


def test_what_is_kept() -> None:
    square = measured(Square(), X)
    assert (square.own, square.state, square.keeps_input) == (0.0, 0.0, True) and square.forward >= 1
    found = measured(Exp(), X)
    assert (found.own, found.keeps_input) == (1.0, False)


def test_a_layer_that_does_not_run_counts_as_a_neuron() -> None:
    assert measured(Refuses(), X) == LeafMemory() and LeafMemory().own == 2


def test_hooks_of_the_user_do_not_run() -> None:
    layer, called = Square(), list[str]()
    layer.register_forward_pre_hook(lambda m, x: called.append("before"))
    layer.register_forward_hook(lambda m, x, y: called.append("after"))
    layer.register_full_backward_hook(lambda m, i, o: called.append("back"))
    assert measured(layer, X).keeps_input and not called
    layer(X)
    assert called == ["before", "after"]


@pytest.mark.parametrize("reset", [0.0, None])
def test_a_framework_neuron(reset: float | None) -> None:
    """Counted by hand for four steps: the hooks that autograd calls for what it saves."""
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    layer = neuron.LIFNode(step_mode="m", v_reset=reset)
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    x = X.clone().requires_grad_()
    twin = frameworks.clone_leaf(layer, {})
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = twin(x)
    other = [value for value in kept.values() if value.dim() and value.numel() > 1]
    own = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in other}
    own.pop(x.untyped_storage().data_ptr(), None)
    last = 0 if reset is None else 2  # what the reset of the last step keeps, which goes with the state
    assert measured(layer, X).own == (sum(own.values()) - last * X[0].nbytes) / y.nbytes


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


def test_generators_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    assert measured(Draws(), X) != LeafMemory() and torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_generators_of_a_gpu_stay_as_they_were() -> None:
    x = X.cuda()
    before = torch.cuda.get_rng_state()
    assert measured(Draws(), x) != LeafMemory() and torch.equal(torch.cuda.get_rng_state(), before)


class Full(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_gpu_is_an_error() -> None:
    """Other ranks would have other facts."""
    with pytest.raises(torch.OutOfMemoryError):
        measured(Full(), X)


def neurons(device: str = "cpu") -> Any:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = nn.Sequential(nn.Linear(8, 8), neuron.LIFNode(step_mode="m")).to(device)
    return trace(net, (X.to(device),), in_dims=1, time_dims=0)


@pytest.mark.parametrize("initialized", [False, True])
def test_where_layers_run(monkeypatch: pytest.MonkeyPatch, initialized: bool) -> None:
    """A GPU that nothing uses stays unused."""
    graph, found = neurons(), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(leaf_memory.torch, "zeros", lambda *_, device, **__: found.append(device))
    monkeypatch.setattr(leaf_memory, "measured", lambda module, x: LeafMemory())
    leaf_memory.put_leaf_memory(graph)
    assert found == [torch.device("cuda", 3) if initialized else torch.device("cpu")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_run_where_the_network_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, found = neurons("cuda"), list[str]()

    def noted(_: nn.Module, x: Tensor) -> LeafMemory:
        found.append(x.device.type)
        return LeafMemory()

    monkeypatch.setattr(leaf_memory, "measured", noted)
    leaf_memory.put_leaf_memory(graph)
    assert found == ["cuda"]


def test_alike_layers_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    ran: list[Any] = []
    name = "snnpart.passes.analyze.leaf_memory.measured"
    monkeypatch.setattr(name, lambda module, x: ran.append(module) or LeafMemory(own=3.0))
    net = nn.Sequential(nn.Linear(8, 8), neuron.LIFNode(step_mode="m"), nn.Linear(8, 8), neuron.LIFNode(step_mode="m"))
    graph = trace(net, (X,), in_dims=1, time_dims=0)
    AnalyzeCost().run(graph)
    leaves = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert len(leaves) == 2 and len(ran) == 1
    assert all(facts.need(node, LeafMemory).own == 3.0 for node in leaves)
