"""Networks that take all steps through one layer after the other: each layer has its own loop, with neurons only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.ops_time import Loop
from tests.passes.rewrite.fold_time.nets import spike
from tests.passes.rewrite.fold_time.parity import active, check, fold, images, traced

KINDS = ("plain", "adaptive", "recurrent", "adaptive recurrent")


class Hidden(nn.Module):
    """[N, T, F] to spikes [N, T, 7]: a product of all steps, then a loop. Its first state is random; the adaptation is
    updated at the head of a step from what the step before left."""

    def __init__(self, features: int, kind: str) -> None:
        super().__init__()
        self.fc, self.norm, self.kind = nn.Linear(features, 7), nn.BatchNorm1d(7), kind
        self.decay, self.slow, self.pull = (nn.Parameter(torch.rand(7) * 0.3 + at) for at in (0.5, 0.6, 0.1))
        self.back = nn.Parameter(torch.randn(7, 7) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.fc(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        u, w, s = (torch.rand(x.shape[0], 7, dtype=x.dtype) for _ in range(3))
        decay, out = self.decay.clamp(0.3, 0.95), []
        for t in range(x.shape[1]):
            current = x[:, t, :]
            if "recurrent" in self.kind:
                current = current + torch.matmul(s, self.back)
            if "adaptive" in self.kind:
                w = self.slow * w + self.pull * u + 0.2 * s
                current = current - w
            u = decay * (u - s) + (1 - decay) * current
            s = spike(u - 0.3)
            out.append(s)
        return torch.stack(out, dim=1)


class Readout(nn.Module):
    """A leaky sum of softmaxes, with nothing that spikes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.decay = nn.Linear(7, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        u, out = torch.rand(x.shape[0], 4, dtype=x.dtype), torch.zeros(x.shape[0], 4, dtype=x.dtype)
        for t in range(x.shape[1]):
            u = self.decay * u + (1 - self.decay) * x[:, t, :]
            out = out + F.softmax(u, dim=1)
        return out


class Net(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.read, self.drop = Hidden(6, kind), Hidden(7, kind), Readout(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.drop(self.one(x))
        two = self.drop(self.two(one))
        return self.read(two), torch.cat([one, two], 2).mean((0, 1))


DIMS = {"in_dims": 0, "time_dims": 1}


@pytest.mark.parametrize("steps", [1, 2, 5, 25])
@pytest.mark.parametrize("kind", KINDS)
def test_folded_computes_what_the_loops_compute(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    net = active(Net(kind))
    check(net, images(3, steps, 6), fires=False, **DIMS)
    one, two = net(images(3, 25, 6))[1].chunk(2)
    assert all(0.01 <= float(rates.mean()) <= 0.99 for rates in (one, two))


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_becomes_one_loop(kind: str) -> None:
    sizes = []
    for steps in (5, 25):
        torch.manual_seed(0)
        graph = fold(traced(active(Net(kind)), images(3, steps, 6), **DIMS))
        assert sum(isinstance(node.target, Loop) for node in graph.graph.nodes) == 3
        sizes.append(len(graph.graph.nodes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropout_behind_a_loop_draws_the_masks_it_drew(kind: str) -> None:
    """They are drawn in the order of memory, and what a loop gives has time first there."""
    torch.manual_seed(0)
    check(active(Net(kind, dropout=0.3)), images(3, 5, 6), fires=False, **DIMS)


class SpikesFirst(nn.Module):
    """A step spikes with what the step before left, and its current is for the next one: the last currents are read by
    nobody. The recurrent product is an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(6, 7) * 0.5), nn.Parameter(torch.randn(7, 7) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        currents = torch.einsum("abc,cd->abd", x, self.w)
        syn = out = torch.zeros(x.shape[0], 7, dtype=x.dtype)
        mem = syn + 0.4
        spikes, mems = [], []
        for t in range(x.shape[1]):
            current = currents[:, t] + torch.einsum("ab,bc->ac", out, self.v)
            out = spike(mem - 0.3)
            mems.append(mem)
            spikes.append(out)
            mem, syn = (0.8 * mem + syn) * (1 - out.detach()), 0.6 * syn + current
        return torch.stack(spikes, 1), torch.stack(mems, 1)


class Decays(nn.Module):
    """Two cells that keep their state on themselves and make their decays of time constants at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.fcs = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
        self.taus = nn.Parameter(torch.rand(2, 2, 7) * 3 + 2)

    def cell(self, i: int, current: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        u, s, b = state
        decay, slow = torch.exp(-1.0 / self.taus[i, 0]), torch.exp(-1.0 / self.taus[i, 1])
        b = slow * b + (1 - slow) * s
        threshold = 0.1 + 0.2 * b
        u = u * decay + (1 - decay) * current - threshold * s
        return u, spike(u - threshold), b

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.zeros(x.shape[0], 7, dtype=x.dtype)
        one = two = (zero, zero, zero + 0.4)
        out = []
        for t in range(x.shape[1]):
            one = self.cell(0, self.fcs[0](x[:, t]), one)
            two = self.cell(1, self.fcs[1](one[1]) + self.fcs[2](two[1]), two)
            out.append(two[1] + two[0])
        return torch.stack(out)


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
@pytest.mark.parametrize("make", [SpikesFirst, Decays])
def test_cells_of_other_forms_compute_what_their_loops_compute(make: type[nn.Module], steps: int) -> None:
    """Of one step there is no loop, and no spike of it comes to a layer; what spikes first has no use for its input
    before the third."""
    torch.manual_seed(0)
    net, x = active(make()), images(4, steps, 6)
    loops = steps > 2 or make is Decays and steps > 1
    graph = check(net, x, fires=loops, **DIMS)
    assert any(isinstance(node.target, Loop) for node in graph.graph.nodes) is loops


@pytest.mark.parametrize("make", [SpikesFirst, Decays])
def test_their_size_does_not_depend_on_the_number_of_steps(make: type[nn.Module]) -> None:
    sizes = []
    for steps in (5, 25):
        torch.manual_seed(0)
        sizes.append(len(fold(traced(active(make()), images(4, steps, 6), **DIMS)).graph.nodes))
    assert sizes[0] == sizes[1]


class Brief(nn.Module):
    """The input reaches the membrane at the first steps only."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.fc, self.out, self.steps = nn.Linear(6, 5), nn.Linear(5, 3), steps

    def forward(self, x: Tensor) -> Tensor:
        v, trace, out = torch.zeros(x.shape[0], 5, dtype=x.dtype), torch.zeros(x.shape[0], 5, dtype=x.dtype), []
        for t in range(self.steps):
            v = 0.7 * v + self.fc(x)
            s = spike(v - 0.4)
            v = v - s.detach()
            if t < self.steps - 2:
                trace = 0.5 * trace + s
            out.append(self.out(s))
        return torch.cat([*out, trace], 1)


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_what_the_last_steps_lack_is_read_where_it_was_made(steps: int) -> None:
    torch.manual_seed(0)
    check(active(Brief(steps)), images(4, 6))
