"""Cases A10, A12, A13, A22, A25 with their numbers: the value in one process, from the simulated ranks.

Data and parameters are fixed sines, so that the numbers need no random generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import simulate
from snnpart.costs import CPU
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from snnpart.program import CompiledProgram
from tests.lowering import analysed
from tests.neurons import Spike, data, fill


class Plif(nn.Module):
    """Thresholds per channel, one learned time constant."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.th = nn.Parameter(torch.linspace(0.1, 0.9, channels, dtype=torch.float64))
        self.w = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, xs: Tensor) -> Tensor:
        v: Any = 0
        out = []
        for x in xs:
            v = v + (x - v) * self.w.sigmoid()
            z = Spike.apply(v - self.th)
            v = v * (1 - z.detach())
            out.append(z)
        return torch.stack(out)


class Tied(nn.Module):
    """One matrix as embedding and head; the neuron integrates along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.l, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        v: Any = None
        out = []
        for t in range(x.shape[1]):
            current = self.l(x[:, t])
            v = current if v is None else 0.5 * v + current
            z = Spike.apply(v - 0.4)
            v = v * (1 - z.detach())
            out.append(z)
        return self.head(torch.stack(out, 1) + x)


class Counting(nn.Module):
    """Four SEW blocks that add: values 0 to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = Spike.apply(self.first(x) - 0.1)
        for block in self.blocks:
            x = Spike.apply(block(x) - 0.4) + x
        return x


def program_of(
    module: nn.Module, x: Tensor, tp: int, shards: Mapping[str, str] | None = None, **options: Any
) -> CompiledProgram:
    graph = analysed(module, (x,), **options)
    plan = decide(graph, tp=tp, pp=1, profile=CPU, shard=shards)
    program = lower(graph, plan, profile=CPU)
    simulate.dry_run(program)
    return program


def norms_of(program: CompiledProgram, x: Tensor, k: float = 0.11) -> tuple[Tensor, dict[str, float]]:
    """The output, and the norm of every gradient for the case's loss."""
    run = simulate.run(program, (x,), training=True)
    (run.outputs[0] * data(*run.outputs[0].shape, k=k)).sum().backward()
    return run.outputs[0].detach(), {n: float(g.norm()) for n, g in run.gradients().items() if g is not None}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a10_gradient_of_a_shared_input(tp: int) -> None:
    module = fill(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1)), scale=0.9)
    x = data(2, 2, 5, 5)
    program = program_of(module, x, tp, {"0": "replicate", "2": "column"})
    run = simulate.run(program, (x,), training=True)
    (run.outputs[0] * data(2, 6, 5, 5, k=0.11)).sum().backward()
    grads = [run.ranks[0, rank].tensors["0.weight"].grad for rank in range(tp)]
    assert float(grads[0].norm()) == pytest.approx(33.346415819888215, rel=1e-9)  # type: ignore[union-attr]
    assert all(torch.equal(grads[0], grad) for grad in grads)  # type: ignore[arg-type]


A12 = {
    "0.weight": 0.747553183, "0.bias": 0.410874028, "1.th": 0.482230967, "1.w": 0.022024516, "2.weight": 2.195081451,
    "2.bias": 1.69467469, "3.th": 2.930482106, "3.w": 1.082549785,
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("rule", ["column", "scatter"])
def test_a12_odd_widths_thresholds_and_a_shared_time_constant(tp: int, rule: str) -> None:
    module = nn.Sequential(nn.Linear(4, 7), Plif(7), nn.Linear(7, 5), Plif(5))
    fill(module[0], scale=0.9)
    fill(module[2], k=0.51, scale=0.9)
    x = data(6, 3, 4) * 2
    program = program_of(module, x, tp, {"0": "column", "2": rule}, in_dims=1, time_dims=0)
    out, norms = norms_of(program, x)
    assert float(out.sum()) == pytest.approx(41.0)
    assert norms == pytest.approx(A12, rel=1e-7)
    thresholds = [t.shape[0] for r in range(tp) for t in program.stage(0, r).tensors if t.name == "1.th"]
    assert thresholds == [7 // tp + (r < 7 % tp) for r in range(tp)]


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a13_depthwise_and_grouped(tp: int) -> None:
    """Groups of two channels: over 3 ranks 4 + 2 + 2, cut where groups end; the depthwise layer before follows."""
    module = nn.Sequential(
        nn.Conv2d(4, 8, 1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 12, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(12, 3, 1, bias=False),
    )
    fill(module, scale=0.9)
    x = data(2, 4, 5, 5)
    program = program_of(module, x, tp, {"0": "column", "3": "row"})
    assert program.plan.shards["1"] == program.plan.shards["2"] == "group"
    out, norms = norms_of(program, x)
    assert float(out.sum()) == pytest.approx(-111.96494480738255, rel=1e-9)
    wanted = {"0.weight": 75.510730618, "1.weight": 54.17699713, "2.weight": 28.219271381, "3.weight": 33.300269229}
    assert norms == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a22_sums_of_spikes_arrive_unchanged(tp: int) -> None:
    module, x = fill(Counting(), scale=0.9), data(3, 3) * 2
    program = program_of(module, x, tp, {"*": "column"})
    out = simulate.run(program, (x,), training=False).outputs[0].detach()
    assert torch.equal(out, module(x).detach()) and float(out.max()) == 5.0


@pytest.mark.parametrize("rule", ["column", "row"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a25_tied_embedding(tp: int, rule: str) -> None:
    """The features of the embedding are dealt out, or the vocabulary."""
    module, tokens = fill(Tied(), scale=0.9), torch.arange(12).reshape(2, 6) % 7
    program = program_of(module, tokens, tp, {"emb": rule})
    run = simulate.run(program, (tokens,), training=True)
    assert float(run.outputs[0].sum()) == pytest.approx(27.680254582482455, rel=1e-9)
    F.cross_entropy(run.outputs[0].flatten(0, 1), (tokens.flatten() + 1) % 7).backward()
    norms = {name: float(grad.norm()) for name, grad in run.gradients().items() if grad is not None}
    wanted = {"emb.weight": 0.770277459, "l.weight": 0.063194176, "l.bias": 0.057995617}
    assert norms == pytest.approx(wanted, rel=1e-8)
