"""Loops over many steps: what runs on fakes does not grow with T, neither does what is left, and nothing is guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import ops
from snnpart.trace import trace
from snnpart.trace.mode import RecordingMode
from tests.neurons import Spike
from tests.passes.rewrite.fold_time.parity import active, check


class Steps(nn.Module):
    """Two spiking layers, stepped as long as the input is; `body(net, t, xt, outs)` changes what a step is given."""

    def __init__(self, body: Callable[[Steps, int, Tensor, list[Tensor]], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        v, w = x.new_zeros(x.shape[1], 6), x.new_zeros(x.shape[1], 3)
        outs: list[Tensor] = []
        for t in range(x.shape[0]):
            step = x[t] if self.body is None else self.body(self, t, x[t], outs)
            v = 0.9 * v + self.first(step)
            s = Spike.apply(v - 0.5)
            v = v - s
            w = 0.8 * w + self.second(s)
            z = Spike.apply(w - 0.5)
            w = w - z
            outs.append(z)
        return torch.stack(outs)


class OverFrames(Steps):
    """The loop goes over the input itself, and writes in place."""

    def forward(self, x: Tensor) -> Tensor:
        v, total = x.new_zeros(len(x[0]), 6), x.new_zeros(len(x[0]), 3)
        for frame in x:
            v.mul_(0.9).add_(self.first(frame))
            s = Spike.apply(v - 0.5)
            v -= s
            total += self.second(s)
        return total / len(x)


def snntorch_net() -> nn.Module:
    snn = pytest.importorskip("snntorch")

    class Net(Steps):
        def __init__(self) -> None:
            super().__init__()
            surrogate = snn.surrogate.atan()
            self.lif1, self.lif2 = (snn.Leaky(beta=0.9, spike_grad=surrogate, threshold=0.5) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            m1, m2, outs = self.lif1.init_leaky(), self.lif2.init_leaky(), []
            for t in range(x.shape[0]):
                s, m1 = self.lif1(self.first(x[t]), m1)
                s, m2 = self.lif2(self.second(s), m2)
                outs.append(m2)
            return torch.stack(outs)

    return Net().float()


def images(steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(steps)
    return torch.rand(steps, 5, 4, dtype=dtype)


@pytest.mark.parametrize("make", [Steps, OverFrames, snntorch_net])
def test_what_runs_on_fakes_does_not_grow_with_the_steps(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Counter[str] = Counter()
    run = RecordingMode._checked

    def counted(mode: RecordingMode, called: Any) -> Any:
        ran[called.name] += 1
        return run(mode, called)

    monkeypatch.setattr(RecordingMode, "_checked", counted)
    counts = []
    for steps in (6, 40):
        ran.clear()
        trace(make(), images(steps, torch.float32), in_dims=1)
        counts.append(
            {name: count for name, count in ran.items() if name != "__getitem__"}
        )  # a view, another each step
    assert counts[0] == counts[1] and sum(counts[0].values()) > 2


@pytest.mark.parametrize(("make", "lengths"), [(Steps, (5, 25, 100)), (OverFrames, (5, 25))])
def test_what_is_left_does_not_grow_with_the_steps(make: Any, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = active(make())
    sizes = {len(check(net, images(steps), in_dims=1).graph.nodes) for steps in lengths}
    assert len(sizes) == 1


def late(net: Steps, t: int, step: Tensor, outs: list[Tensor]) -> Tensor:
    return net.other(step) if t > 50 else step


def counted_in_a_list(net: Steps, t: int, step: Tensor, outs: list[Tensor]) -> Tensor:
    return net.other(step) if len(outs) > 50 else step


def every_seventeenth(net: Steps, t: int, step: Tensor, outs: list[Tensor]) -> Tensor:
    return step + net.other(step) if t % 17 == 16 else step


def once(net: Steps, t: int, step: Tensor, outs: list[Tensor]) -> Tensor:
    return step * 1.5 if t == 57 else step


@pytest.mark.parametrize(
    ("body", "calls", "multiplied"), [(late, 9, 0), (counted_in_a_list, 9, 0), (every_seventeenth, 3, 0), (once, 0, 1)]
)
def test_a_step_that_differs_late_in_a_long_loop_is_kept(body: Any, calls: int, multiplied: int) -> None:
    torch.manual_seed(1)
    net, x = active(Steps(body)), images(60)
    graph = trace(net, x, in_dims=1)
    read = [node for node in graph.graph.nodes if node.op == "get_attr" and node.target == "other.weight"]
    assert sum(len(node.users) for node in read) == calls
    assert sum(1.5 in node.args for node in graph.graph.nodes) == multiplied
    check(net, x, in_dims=1)


class NormThroughTime(Steps):
    """A21: another BatchNorm at every step, chosen by a counter that the module keeps."""

    def __init__(self, steps: int) -> None:
        super().__init__(NormThroughTime.normed)
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(steps))
        self.t = 0

    @staticmethod
    def normed(net: Any, t: int, step: Tensor, outs: list[Tensor]) -> Tensor:
        y: Tensor = net.norms[net.t](step)
        net.t += 1
        return y

    def forward(self, x: Tensor) -> Tensor:
        self.t = 0
        return super().forward(x)


def test_a21_a_norm_for_each_of_many_steps() -> None:
    torch.manual_seed(2)
    net = active(NormThroughTime(40))
    graph = trace(net, images(40), in_dims=1)
    means = [node.args[3].target for node in graph.graph.nodes if node.target is ops.batch_norm]
    assert means == [f"norms.{t}.running_mean" for t in range(40)]
    folded = check(net, images(40), in_dims=1)
    assert sum(node.target is ops.batch_norm for node in folded.graph.nodes) == 40
