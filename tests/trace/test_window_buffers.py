"""Neurons that keep their state in registered buffers, which take the shape of what comes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snnpart import ops, parallelize
from snnpart.trace import trace
from tests.neurons import Spike, data, fill
from tests.trace.parity import check


class BufferNeuron(nn.Module):
    """The membrane, and a count of spikes, in buffers of one element until the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("v", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def reset(self) -> None:
        self.v, self.count = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.v = 0.5 * self.v + x
        out: Tensor = Spike.apply(self.v - 0.2)  # type: ignore[no-untyped-call]
        self.count = self.count + out.detach()
        return out


class Net(nn.Module):
    """[N, 4] -> [N, 3], three steps; `resets` says whether forward itself starts a window."""

    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.a, self.neuron, self.b, self.resets = nn.Linear(4, 6), BufferNeuron(), nn.Linear(6, 3), resets
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.resets:
            self.neuron.reset()
        self.average = 0.9 * self.average + x.detach().mean(0)
        return torch.stack([self.b(self.neuron(self.a(x))) for _ in range(3)]).mean(0)


def used(resets: bool, batch: int) -> nn.Module:
    """A net that was run without gradients, and still holds that window."""
    net = fill(Net(resets))
    with torch.no_grad():
        net(data(batch, 4))
    assert net.neuron.v.shape == (batch, 6)  # type: ignore[union-attr]
    return net


@pytest.mark.parametrize("resets", [True, False], ids=["reset inside", "reset outside"])
@pytest.mark.parametrize("left", [5, 2, 1], ids=lambda n: f"left at batch {n}")
def test_state_of_a_window_is_not_a_stored_tensor(resets: bool, left: int) -> None:
    net = used(resets, left) if left > 1 else fill(Net(resets))
    graph = trace(net, data(5, 4))
    assert graph.window_buffers() == {"neuron.v", "neuron.count"}
    assert graph.batch_fixed == "", "the leftover of one batch size would fix it"
    stored = [node.args[0].target for node in graph.graph.nodes if node.target is ops.assign]  # type: ignore[union-attr]
    assert stored == ["average"], "a buffer of one shape is written back"
    assert graph.tensors["neuron.v"].tensor.shape == ((1,) if left in (5, 2) else net.neuron.v.shape)  # type: ignore


def test_every_batch_size_equals_eager() -> None:
    check(fill(Net(True)), data(5, 4) * 2, others=data(3, 4) * 2)


def test_the_module_keeps_what_it_held() -> None:
    net = used(False, 5)
    held = net.neuron.v  # type: ignore[union-attr]
    parallelize(net, example_inputs=data(5, 4), tp=2, microbatches=2, verify="full")
    assert net.neuron.v is held  # type: ignore[union-attr]
