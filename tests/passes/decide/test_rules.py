"""Rows of the sharding table, each against the same operation in one process.

A convolution with 7 channels is sharded by columns over 3 ranks (3 + 2 + 2), the operation follows; output and every
gradient must be equal, and the operation must have been sharded, or have declined with the reason given here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import facts
from snnpart.facts import Placement, Sharded
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from tests.lowering import Spike, assert_parity, compiled

X = (4, 2, 6, 6)


class Cross(torch.autograd.Function):
    """A surrogate that couples channels in its backward only."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)


class Net(nn.Module):
    """conv -> operation, with a vector of 7 and a scalar to use."""

    def __init__(self, operation: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.operation = nn.Conv2d(2, 7, 3, padding=1), operation
        self.v, self.s = nn.Parameter(torch.linspace(0.5, 1.5, 7)), nn.Parameter(torch.tensor(0.7))
        self.norm = nn.BatchNorm2d(7)
        self.depth = nn.Conv2d(7, 14, 3, padding=1, groups=7)
        self.up = nn.ConvTranspose2d(7, 3, 2, stride=2)
        self.one, self.line = nn.Conv1d(7, 4, 1), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self, self.conv(x))


FOLLOW: dict[str, Callable[..., Tensor]] = {
    "relu": lambda m, y: torch.relu(y),
    "clamp": lambda m, y: y.clamp(-1, 1),
    "scalar parameter": lambda m, y: y * m.s,
    "derived scalar": lambda m, y: y * m.s.sigmoid(),
    "vector by view": lambda m, y: y - m.v.view(1, 7, 1, 1),
    "vector by index": lambda m, y: y - m.v[:, None, None],
    "vector after transpose": lambda m, y: y.permute(0, 2, 3, 1) * m.v,
    "two operands": lambda m, y: y * torch.tanh(y),
    "where": lambda m, y: torch.where(y > 0, y, 0.1 * y),
    "detach": lambda m, y: y * (1 - (y > 0).to(y).detach()),
    "surrogate": lambda m, y: Spike.apply(y - 0.1),
    "batch norm": lambda m, y: m.norm(y),
    "depthwise": lambda m, y: m.depth(y),
    "max pool": lambda m, y: F.max_pool2d(y, 2),
    "average pool": lambda m, y: F.avg_pool2d(y, 2),
    "adaptive pool": lambda m, y: F.adaptive_avg_pool2d(y, 2),
    "interpolate": lambda m, y: F.interpolate(y, scale_factor=2.0),
    "pad": lambda m, y: F.pad(y, (1, 1, 0, 2)),
    "flatten": lambda m, y: y.flatten(1) ** 2,
    "flatten behind rows": lambda m, y: y.permute(0, 2, 1, 3).flatten(1) * 2,
    "flatten behind rows and split": lambda m, y: y.transpose(1, 2).reshape(-1, 3, 14, 6).pow(2),
    "queries, keys and values": lambda m, y: torch.mul(*torch.stack([y, y.tanh()], 1).flatten(1, 2).chunk(2, 1)),
    "reshape": lambda m, y: y.reshape(y.shape[0], 7, 36).pow(2),
    "unflatten batch": lambda m, y: y.unflatten(0, (1, -1)) * 2,
    "transpose": lambda m, y: y.transpose(1, 3) * 2,
    "permute": lambda m, y: y.permute(1, 0, 2, 3) * 2,
    "movedim": lambda m, y: y.movedim(1, 0) * 2,
    "unsqueeze": lambda m, y: y.unsqueeze(0).unsqueeze(-1) * 2,
    "squeeze": lambda m, y: y.unsqueeze(0).squeeze(0) * 2,
    "squeeze all": lambda m, y: y.mean(2, keepdim=True).squeeze() * 2,
    "split": lambda m, y: torch.mul(*torch.cat([y, y.tanh()], 2).split(6, 2)),
    "cat channels": lambda m, y: torch.cat([y, 2 * y], 1),
    "cat rows": lambda m, y: torch.cat([y, 2 * y], 2),
    "stack": lambda m, y: torch.stack([y, 2 * y]),
    "select": lambda m, y: y[:, :, 0] * 2,
    "slice": lambda m, y: y[..., 1:3] * 2,
    "index none": lambda m, y: y[:, None, :, 2] * 2,
    "unbind": lambda m, y: sum(y.unbind(3)),  # type: ignore[return-value]
    "chunk": lambda m, y: torch.mul(*y.chunk(2, 2)),
    "mean": lambda m, y: y.mean((2, 3)),
    "mean keepdim": lambda m, y: y * y.mean((2, 3), keepdim=True),
    "sum of batch": lambda m, y: y.sum(0).unsqueeze(0) + y,
    "amax": lambda m, y: y.amax(2),
    "softmax over rows": lambda m, y: y.softmax(2),
    "expand": lambda m, y: y.unsqueeze(0).expand(3, -1, 7, -1, -1) * 2,
    "repeat": lambda m, y: y.unsqueeze(0).repeat(3, 1, 1, 1, 1) * 2,
    "index assign": lambda m, y: _written(y),
    "index assign behind dots": lambda m, y: _written_behind_dots(y),
    "matmul of heads": lambda m, y: y @ y.transpose(2, 3).tanh(),
    "row conv": lambda m, y: m.one(y.flatten(2)),
    "row linear": lambda m, y: m.line(y.mean((2, 3))),
    "row transposed": lambda m, y: m.up(y),
}

DECLINE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mean of channels": (lambda m, y: y.mean(1), "reduces over the sharded dim"),
    "softmax of channels": (lambda m, y: y.softmax(1), "works along the sharded dim"),
    "flip of channels": (lambda m, y: y.flip(1), "works along the sharded dim"),
    "slice of channels": (lambda m, y: y[:, 1:4], "indexes the sharded dim"),
    "flatten with the batch": (lambda m, y: y.flatten(0, 1), "merged into a dim outside it that grows"),
    "flatten to many runs": (lambda m, y: y.permute(0, 2, 3, 1).flatten(1), "would hold more than 16 runs"),
    "pool of channels": (lambda m, y: F.avg_pool1d(y.mean((2, 3)), 3), "pools over the sharded dim"),
    "unknown operation": (lambda m, y: torch.special.i0(y), "not in the sharding table"),
    "coupling surrogate": (lambda m, y: Cross.apply(y), "not seen to treat every element by itself"),
    "product": (lambda m, y: y.mean(3) @ y.mean(3).transpose(1, 2), "batch dims"),
}


def _written_behind_dots(y: Tensor) -> Tensor:
    z = y * 2
    z[..., 0] = y[..., 1]
    return z


def _written(y: Tensor) -> Tensor:
    out = torch.zeros(2, *y.shape, dtype=y.dtype)
    for t in range(2):
        out[t] = y * (t + 1)
    return out


def _sharded(operation: Callable[..., Tensor], tp: int) -> tuple[nn.Module, tuple[Tensor, ...], CompiledProgram]:
    module = Net(operation).double()
    inputs = (torch.randn(X, dtype=torch.float64),)
    pinned = Plan(tp=tp, shards={"conv": "column"})
    return module, inputs, compiled(module, inputs, tp=tp, pinned=pinned)


@pytest.mark.parametrize("name", sorted(FOLLOW))
def test_an_operation_follows_its_sharded_input(name: str) -> None:
    module, inputs, program = _sharded(FOLLOW[name], 3)
    conv = next(node for node in program.source.graph.nodes if node.target is torch.conv2d)
    assert isinstance(facts.need(conv, Placement).output, Sharded)
    for user in conv.users:
        assert facts.need(user, Placement).rule in ("shard", "group", "row"), program.source.notes
    assert_parity(module, inputs, program)


@pytest.mark.parametrize("tp", [6, 8])
@pytest.mark.parametrize(
    "operation",
    [
        lambda m, y: y.mean(2, keepdim=True).squeeze() * 2,
        lambda m, y: torch.mul(*torch.stack([y, y.tanh()], 1).flatten(1, 2).split(7, 1)),
    ],
    ids=["squeeze", "split"],
)
def test_on_ranks_with_one_channel_or_none_too(operation: Callable[..., Tensor], tp: int) -> None:
    """Sizes say something else there."""
    assert_parity(*_sharded(operation, tp))


@pytest.mark.parametrize("name", sorted(DECLINE))
def test_an_operation_declines_with_a_reason(name: str) -> None:
    operation, reason = DECLINE[name]
    module, inputs, program = _sharded(operation, 2)
    notes = [text for key, text in program.source.notes.items() if key.startswith("replicated")]
    assert any(reason in text for text in notes), program.source.notes
    assert_parity(module, inputs, program)
