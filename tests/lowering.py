"""What tests of the lowering share: small networks of plain PyTorch, compile, and comparison with the user's module."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import frameworks, simulate
from snnpart.costs import CPU
from snnpart.graph import SpikeGraph
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from snnpart.trace import trace


class Spike(torch.autograd.Function):
    """Step forward, smooth backward."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad / (1 + (2 * u).abs()) ** 2


def fire(u: Tensor) -> Tensor:
    spikes: Tensor = Spike.apply(u)  # type: ignore[no-untyped-call]
    return spikes


class Block(nn.Module):
    """Two convolutions with BatchNorm and spikes, and a residual."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return fire(self.norm2(self.conv2(fire(self.norm1(self.conv1(x)))))) + x


class Residual(nn.Module):
    """Stem, blocks, global mean, head."""

    def __init__(self, channels: int = 6, inner: int = 7, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(channels, inner) for _ in range(blocks)])
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(fire(self.stem(x))).mean((2, 3)))


class Neuron(nn.Module):
    """Thresholds per channel and one learned decay: state in a local variable, time in the leading dim (case A12)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.th = nn.Parameter(torch.linspace(0.01, 0.2, channels))
        self.w = nn.Parameter(torch.tensor(0.3))

    def forward(self, xs: Tensor) -> Tensor:
        v: Any = 0
        out = []
        for x in xs:
            v = v + (x - v) * self.w.sigmoid()
            spikes = fire(v - self.th)
            v = v * (1 - spikes.detach())
            out.append(spikes)
        return torch.stack(out)


def widths(hidden: int = 7, out: int = 5) -> nn.Module:
    """The network of case A12: [T, N, 4] -> [T, N, out]."""
    return nn.Sequential(nn.Linear(4, hidden), Neuron(hidden), nn.Linear(hidden, out), Neuron(out))


class Loop(nn.Module):
    """A recurrent layer in a time loop: [N, T, 4] -> [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.recurrent, self.out = nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        v = spikes = torch.zeros(x.shape[0], 7, dtype=x.dtype)
        total: Any = 0.0
        for t in range(x.shape[1]):
            v = 0.5 * v + self.inward(x[:, t]) + self.recurrent(spikes)
            spikes = fire(v - 0.1)
            v = v * (1 - spikes.detach())
            total = total + self.out(spikes)
        return total / x.shape[1]


class UNet(nn.Module):
    """Two levels, concatenation, a transposed and a depthwise convolution: [N, 2, 8, 8] -> ([N, 3, 8, 8], [N])."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 6, 3, stride=2, padding=1)
        self.depth = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(9, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = fire(self.down1(x))
        two = fire(self.depth(fire(self.down2(one) - 0.1)))
        joined = torch.cat([one, fire(self.up(two))], 1)
        return self.last(joined), two.sum((1, 2, 3))


class Skip(nn.Module):
    """Skips over several layers (case A14): [N, 4] -> [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        p = fire(self.a(x))
        q = fire(self.b(p) + 0.3)
        r = fire(self.c(q))
        u = fire(self.d(r)) + p
        return self.head(torch.cat([p, q, u], -1))


class Tied(nn.Module):
    """One weight at both ends, another layer between: [N, 6] -> [N, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = fire(self.between(fire(self.first(x))))
        return nn.functional.linear(hidden, self.first.weight.t())


class Two(nn.Module):
    """Two inputs, the second used late; two outputs, one from the beginning; an unused parameter (case A28)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        early = fire(self.left(x))
        return {"early": early, "late": self.head(early + fire(self.right(y)))}


NETS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "residual": (Residual, ((6, 2, 8, 8),), {}),
    "widths": (widths, ((5, 6, 4),), {"in_dims": 1, "time_dims": 0}),
    "loop": (Loop, ((6, 5, 4),), {}),
    "unet": (UNet, ((6, 2, 8, 8),), {}),
    "skip": (Skip, ((6, 4),), {}),
    "tied": (Tied, ((6, 6),), {}),
    "two": (Two, ((6, 4), (6, 3)), {}),
}


def make(name: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A network of `NETS` in float64, inputs, and how it is traced."""
    factory, shapes, options = NETS[name]
    torch.manual_seed(3)
    module: nn.Module = factory().double()
    return module, tuple(2 * torch.randn(shape, dtype=torch.float64) for shape in shapes), options


def analysed(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> SpikeGraph:
    """The network traced, canonical, with all facts."""
    graph = trace(module, inputs, **options)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    return graph


def compiled(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    pinned: Plan | None = None,
    objective: Any = "max",
    **options: Any,
) -> CompiledProgram:
    """The network lowered, and dry-run."""
    graph = analysed(module, inputs, **options)
    plan = decide(graph, tp=tp, pp=pp, microbatches=microbatches, pinned=pinned, profile=CPU, objective=objective)
    program = lower(graph, plan, profile=CPU)
    simulate.dry_run(program)
    return program


def reference(
    module: nn.Module, inputs: tuple[Tensor, ...], in_dim: int, microbatches: int
) -> tuple[nn.Module, list[Tensor]]:
    """A copy of the module that has run the microbatches in turn, and its outputs put together along the batch dim."""
    copied = copy.deepcopy(module)
    parts = zip(*(x.chunk(microbatches, in_dim) for x in inputs))
    outputs = []
    for part in parts:
        frameworks.reset_state(copied)
        outputs.append([t for t in pytree.tree_leaves(copied(*part)) if isinstance(t, Tensor)])
    return copied, [torch.cat(values, in_dim) for values in zip(*outputs)]


def assert_parity(
    module: nn.Module, inputs: tuple[Tensor, ...], program: CompiledProgram, *, in_dim: int = 0, microbatches: int = 1
) -> None:
    """Outputs, every gradient and every buffer of the simulated program equal the module's, to 1e-9 of their scale."""
    ran, want = reference(module, inputs, in_dim, microbatches)
    got = simulate.run(program, inputs, training=True, microbatches=microbatches)
    cotangents = [torch.randn_like(value) for value in want]
    for outputs in (want, got.outputs):
        sum((value * w).sum() for value, w in zip(outputs, cotangents)).backward()  # type: ignore[union-attr]
    for a, b in zip(want, got.outputs, strict=True):
        near(a, b, "output")
    assert_gradients(ran, got.gradients())
    buffers = got.buffers()
    for name, buffer in ran.named_buffers():
        near(buffer, buffers[name], name)


def assert_gradients(ran: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    """Every parameter that has a gradient has the same one, and some gradient flows at all."""
    expected = {name: p.grad for name, p in ran.named_parameters() if p.grad is not None}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    assert scale > 1e-3
    for name, grad in expected.items():
        found = gradients[name]
        assert found is not None, name
        # A bias before BatchNorm has gradient zero but for rounding: the scale is that of all gradients.
        assert float((grad - found).abs().max()) <= 1e-9 * scale, name


def near(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, what
    a, b = a.detach(), b.detach()
    if a.numel():
        assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(a.abs().max())), what


def rates(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[float]:
    """The firing rate of every call of `Spike`."""
    seen: list[float] = []
    original = Spike.forward

    def forward(ctx: Any, u: Tensor) -> Tensor:
        spikes = original(ctx, u)
        seen.append(float(spikes.mean()))
        return spikes

    Spike.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        module(*inputs)
    finally:
        Spike.forward = staticmethod(original)  # type: ignore[method-assign]
    return seen
