"""What the ranks do in the tests of BatchNorm statistics that are shared over dp."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from snnpart.api import parallelize
from tests.distributed.cases import LIF, det, fill, reset


class Steps(nn.Module):
    """Case A07: BatchNorm of [T, N, C, H, W] over T, N, H, W."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return out


class Looped(nn.Module):
    """Case A08: BatchNorm called T times in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.bn = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum(self.bn(self.c(x[t])) for t in range(x.shape[0]))  # type: ignore[assignment]
        return out


class Spiking(nn.Module):
    """Convolutions, norms and neurons, with a repeated image that is hoisted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na, self.b, self.nb = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        self.lif, self.h = LIF(vth=0.2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        out = 0.0
        for _ in range(3):
            out = out + self.h(self.nb(self.b(self.lif(self.na(self.a(x))))).flatten(1))
        return out  # type: ignore[return-value]


def network(name: str) -> tuple[nn.Module, Tensor, str, int]:
    """The case's network, whole batch, layout and batch dim."""
    if name == "a07":
        return Steps(), det(4, 6, 3, 2, 2) * 2, "TNCHW", 1
    if name == "a07 n == c":
        return Steps(6), det(4, 6, 6, 2, 2) * 2, "TNCHW", 1
    if name == "a08":
        return fill(Looped(), scale=0.9), det(3, 6, 4), "TNF", 1
    return fill(Spiking(), scale=0.9), det(7, 2, 6, 6) * 2, "NCHW", 0


def loss_of(name: str) -> Any:
    """A mean over samples, given outputs and the samples' own weights."""
    return lambda out, w: (out.movedim(1, 0) if name.startswith("a07") else out).flatten(1).mul(w).sum(1).mean()


def weights_for(model: nn.Module, x: Tensor, name: str, batch_dim: int) -> Tensor:
    outputs = {"a07": 4 * 3 * 4, "a07 n == c": 4 * 6 * 4, "a08": 4}.get(name, 3)
    return det(x.shape[batch_dim], outputs, k=0.2)


def one_process(name: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model, x, _, batch_dim = network(name)
    loss = loss_of(name)(model(x), weights_for(model, x, name, batch_dim))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads, {n: b.clone() for n, b in model.named_buffers()}


def synchronised(name: str, tp: int = 1, pp: int = 1, dp: str = "ddp", fuse: bool = False) -> tuple[Any, ...]:
    """One step with statistics shared over dp; the batch is cut unevenly where it does not divide."""
    model, x, layout, batch_dim = network(name)
    program = parallelize(
        model, tp=tp, pp=pp, dp=dp, batchnorm="sync", microbatches=1, schedule="gpipe", input_layout=layout,
        example_inputs=x, reset=reset, fuse=fuse,
    )  # fmt: skip
    running: Any = program.launch()
    with running:
        at, size = running.ranks.at.dp, running.ranks.mesh.dp
        w = weights_for(model, x, name, batch_dim).tensor_split(size)[at]
        loss = running.train_step(x.tensor_split(size, batch_dim)[at], w, loss_of(name)).item()
        state = running.state_dict()
        return loss, running.gradients(), {n: state[n] for n, _ in model.named_buffers()}
