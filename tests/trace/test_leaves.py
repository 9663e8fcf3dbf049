"""Neuron layers of frameworks: one node a call; state as arguments, hidden state, code that touches hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts
from snnpart.errors import TraceError
from snnpart.facts import Values
from snnpart.trace import trace
from tests.neurons import data, fill
from tests.trace.parity import check

spikingjelly = pytest.importorskip("spikingjelly.activation_based")


def lif(**options: Any) -> nn.Module:
    from spikingjelly.activation_based import neuron

    return neuron.LIFNode(detach_reset=True, v_threshold=0.2, **options)


class Looped(nn.Module):
    """A single-step neuron called in a time loop; `touch` may reach into it."""

    def __init__(self, touch: Callable[[Looped, int], Any] = lambda net, t: None, steps: int = 3) -> None:
        super().__init__()
        self.l, self.n, self.touch, self.steps = nn.Linear(4, 6), lif(), touch, steps

    def forward(self, x: Tensor) -> Tensor:
        out = 0.0
        for t in range(self.steps):
            self.touch(self, t)
            out = out + self.n(self.l(x))
        return out


def test_a_neuron_called_several_times_is_several_nodes() -> None:
    graph = check(fill(Looped()), data(5, 4) * 2, others=data(7, 4))
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["n"] * 3
    assert graph.leaves["n"].neuron and graph.leaves["n"].framework == "spikingjelly"
    assert not graph.states and not [a for a in graph.assumptions if a.kind == "neuron"]


def reset_net(net: Looped, t: int) -> None:
    from spikingjelly.activation_based import functional

    if t == net.steps - 3:
        functional.reset_net(net)


def test_a_reset_before_the_first_call_is_free() -> None:
    check(fill(Looped(reset_net)), data(5, 4) * 2)


@pytest.mark.parametrize(
    ("touch", "match"),
    [
        (lambda net, t: net.n.v if t else None, "'v' of the neuron layer 'n' is read after a call"),
        (lambda net, t: setattr(net.n, "v", 0.0) if t else None, "'v' of the neuron layer 'n' is set after a call"),
        (lambda net, t: net.n.reset() if t else None, "of the neuron layer 'n' is read after a call"),
    ],
)
def test_state_of_a_called_neuron_is_out_of_reach(touch: Callable[[Looped, int], Any], match: str) -> None:
    model = fill(Looped(touch))
    kind = dict(vars(type(model.n)))
    with pytest.raises(TraceError, match=match) as caught:
        trace(model, data(5, 4))
    assert "test_leaves.py" in str(caught.value) or "spikingjelly" in str(caught.value)
    assert dict(vars(type(model.n))) == kind


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.layers = nn.Linear(4, 6), [lif()]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.l(x))


def test_a_neuron_in_a_plain_list_is_refused() -> None:
    with pytest.raises(TraceError, match="a LIFNode is called that the model does not register") as caught:
        trace(fill(Unregistered()), data(5, 4))
    assert "nn.ModuleList" in str(caught.value)


class Shared(nn.Module):
    """One neuron under two names, called with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.first = lif()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x=self.l(self.first(self.l(x))))


def test_a_neuron_under_two_names_is_one_leaf() -> None:
    graph = check(fill(Shared()), data(5, 4) * 2)
    assert list(graph.leaves) == ["first"] and graph.notes == {"other names of first": "second"}
    calls = [(node.target, list(node.kwargs)) for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == [("first", []), ("first", ["x"])]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(4, 6), lif()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.n(self.l(x))
        return self.l(x) * gate


def test_a_neuron_under_no_grad_carries_no_gradient() -> None:
    graph = check(fill(Gated()), data(5, 4) * 2)
    (call,) = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert [user.target for user in call.users] == [torch.detach] or call.args[0].target is torch.detach  # type: ignore[union-attr]


class Explicit(nn.Module):
    """snnTorch's idiom: init_leaky() before the loop, spikes and membrane handed on; the membrane is returned."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch as snn

        surrogate = snn.surrogate.fast_sigmoid()
        self.l = nn.Linear(4, 6)
        self.n = snn.Leaky(beta=0.7, threshold=0.3, learn_beta=True, spike_grad=surrogate)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mem = self.n.init_leaky()
        spikes = []
        for _ in range(3):
            spk, mem = self.n(self.l(x), mem)
            spikes.append(spk)
        return torch.stack(spikes), mem + self.n.beta


def test_snntorch_state_as_arguments() -> None:
    pytest.importorskip("snntorch")
    model = fill(Explicit()).float()
    graph = check(model, data(5, 4).float() * 2, others=data(3, 4).float())
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert len(calls) == 3 and all(isinstance(facts.get(node, Values), Values) for node in calls)
    assert graph.tensors["n.beta"].leaf == "n" and graph.tensors["n.beta"].kind == "parameter"


def test_snntorch_module_called_t_times_with_init_inside() -> None:
    pytest.importorskip("snntorch")
    check(fill(Explicit()).float(), data(5, 4).float(), time_steps=2)


class NorseState(nn.Module):
    """Norse: state is None first, then a NamedTuple, handed on by the user."""

    def __init__(self) -> None:
        super().__init__()
        import norse.torch as norse

        self.l, self.n = nn.Linear(4, 6), norse.LIFRecurrentCell(6, 6)

    def forward(self, xs: Tensor) -> tuple[Tensor, Any]:
        state, outs = None, []
        for x in xs:
            z, state = self.n(self.l(x) * 4, state)
            outs.append(z)
        return torch.stack(outs), state


def test_norse_state_is_a_named_tuple() -> None:
    pytest.importorskip("norse")
    graph = check(fill(NorseState()).float(), data(4, 3, 4).float() * 3, in_dims=1, others=data(4, 5, 4).float())
    assert [o.name for o in graph.outputs] == ["output.0", "output.1.z", "output.1.v", "output.1.i"]
    assert [o.batch_dim for o in graph.outputs] == [1, 0, 0, 0]
