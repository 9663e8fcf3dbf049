"""In-place writes become functional: outputs and gradients as in eager, and the caller's tensors stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import ops
from snnpart.effects import is_in_place
from snnpart.errors import TraceError
from snnpart.trace import trace
from tests.neurons import Spike, data, fill
from tests.trace.parity import check


class Between(nn.Module):
    """A function between two linear layers, so that gradients pass through it."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(width, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def iadd(x: Tensor) -> Tensor:
    y = torch.sigmoid(x) + 1
    y += x
    y *= 2
    y -= 0.5
    y /= 3
    return y + x


def residual(x: Tensor) -> Tensor:
    """SEW-ResNet: `out += identity`, where both have other names."""
    out = Spike.apply(x)
    identity = x
    alias = out
    out += identity
    return alias * out


def inplace_relu(x: Tensor) -> Tensor:
    y = F.relu(x * 1.5 + 0, inplace=True) * 2
    z = x + 0.5
    F.leaky_relu_(z, 0.1)
    return nn.ReLU(inplace=True)(y - 0.1) + z


def slice_writes(x: Tensor) -> Tensor:
    """MS-ResNet: `out[i] = spike` into zeros."""
    out = torch.zeros_like(x)
    for i in range(4):
        out[:, i] = x[:, i] * (i + 1)
    out[..., -1] += x[..., 0]
    return out


def step_writes(x: Tensor) -> Tensor:
    frames = torch.zeros(3, *x.shape, dtype=x.dtype)
    mem = torch.zeros_like(x)
    for t in range(3):
        mem = 0.5 * mem + x
        frames[t] = Spike.apply(mem - 0.2)
        mem = mem * (1 - frames[t].detach())
    return frames.mean(0)


def mask_writes(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0.25
    y.masked_fill_(x < -0.5, -1.0)
    return y


def view_writes(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1)[::2] += 1.0
    y.t()[0] *= 3
    columns = y.unbind(1)
    return y + columns[0].unsqueeze(1)


def views_see_writes(x: Tensor) -> Tensor:
    y = x * 2
    first, flat = y[:, :2], y.reshape(-1)
    y += 1
    first.mul_(2)
    return y + flat.view(y.shape) + F.pad(first, (0, 2))


def chunk_writes(x: Tensor) -> Tensor:
    y = x.detach() * 2
    left, right = y.chunk(2, dim=1)
    left += 1
    right[0] = 5
    y.narrow(1, 1, 2).add_(0.5)
    y.select(1, 3).zero_()
    y.transpose(0, 1)[1].fill_(2.0)
    y.permute(1, 0).unsqueeze(0).squeeze(0)[0].sub_(1)
    return x * y


def shape_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze_(0)
    y = y.repeat(2, 1, 1)
    y.squeeze_()
    z = y.mean(0)
    z.t_()
    z += 1
    return z.t()


def copies(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x * 3)
    z = torch.empty(x.shape[0], 4, dtype=torch.float64)
    z.copy_(x[0])
    w = torch.zeros(4, dtype=torch.float64)
    torch.add(x[0], 1.0, out=w.detach()) if False else w.add_(1)
    return y + z + w


def keeps_dtype(x: Tensor) -> Tensor:
    count = torch.zeros(4, dtype=torch.int64)
    count += x[0] > 0
    mask = torch.zeros(4, dtype=torch.float32)
    mask.copy_(x[0].detach())
    ones = torch.ones(4, dtype=torch.float32)
    ones *= torch.tensor(3.5, dtype=torch.float64)
    hit = torch.ones_like(x)
    hit.gt_(0.5)
    return x * count + mask + ones + hit


def detached_writes(x: Tensor) -> Tensor:
    trace_ = torch.zeros_like(x)
    with torch.no_grad():
        trace_.add_(x)
        trace_.mul_(0.5)
    y = x * 2
    y.detach_()
    return x * trace_ + y


def out_argument(x: Tensor) -> Tensor:
    held = torch.empty_like(x.detach())
    torch.mul(x.detach(), 2, out=held)
    return x + held


def boolean(x: Tensor) -> Tensor:
    mask = x.detach() > 0
    mask |= x.detach() < -0.5
    mask &= ~(x.detach() > 0.8)
    return x * mask


def index_functions(x: Tensor) -> Tensor:
    y = torch.zeros(4, 4, dtype=torch.float64)
    y.index_add_(0, torch.tensor([0, 2]), x[:2])
    y.scatter_(1, torch.tensor([[0], [1]]), 7.0)
    y.clamp_(max=5)
    return x @ y


CASES = [
    iadd, residual, inplace_relu, slice_writes, step_writes, mask_writes, view_writes, views_see_writes, chunk_writes,
    copies, keeps_dtype, detached_writes, out_argument, boolean, index_functions,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_in_place_code_equals_eager(function: Callable[..., Any]) -> None:
    graph = check(fill(Between(function)), data(4, 4) * 2, others=data(6, 4) * 2)
    for node in graph.graph.nodes:
        assert not is_in_place(node), node.format_node()


def test_shape_changed_in_place() -> None:
    check(fill(Between(shape_in_place)), data(4, 4))


def test_an_input_that_is_written_stays_as_it_was() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            x.unsqueeze_(0)
            return self.l(x)

    x = data(3, 4)
    graph = trace(fill(Writes()), x)
    assert x.shape == (3, 4) and x._version == 0
    assert [node.target for node in graph.graph.nodes if node.op == "call_method"] == ["add", "unsqueeze"]


class Counting(nn.Module):
    """Buffers written in place, assigned anew, and read before the write."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("low", torch.full((4,), 9.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x) * self.scale
        self.seen += 1
        self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean(0)
        with torch.no_grad():
            self.low[:2].copy_(torch.minimum(self.low, y.amin(0))[:2])
        return y * self.scale + self.low


def test_buffers_are_assigned_at_the_end() -> None:
    model = fill(Counting())
    graph = check(model, data(3, 4), others=data(5, 4))
    assigned = sorted(node.args[0].target for node in graph.graph.nodes if node.target is ops.assign)
    assert assigned == ["low", "scale", "seen"] and graph.states == ()
    assert int(model.seen) == 0


class StateBuffer(nn.Module):
    """A membrane in a buffer whose shape changes: state, not a buffer to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("v", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.v = 0.5 * self.v + self.l(x)
        return Spike.apply(self.v - 0.1)


def test_a_buffer_that_changes_shape_is_state() -> None:
    graph = trace(fill(StateBuffer()), data(3, 4))
    assert [(s.module, s.name, s.initial) for s in graph.states] == [("", "v", "tensor[1]")]
    assert not [node for node in graph.graph.nodes if node.target is ops.assign]
    assert [a.kind for a in graph.assumptions] == ["state"]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: [y := x * 2, y.expand(2, 4, 4)[0].detach().add_(1), y][-1], "through"),
        (lambda x: [y := x * 2, y.data.add_(1), y][-1], "through the result of 'data'"),
        (lambda x: [y := x * 2, y.detach().add_(1), y][-1], "through the result of 'detach'"),
        (lambda x: x.set_(torch.zeros(4, 4)), "'set_'"),
        (lambda x: x.register_hook(lambda g: g * 2) and x, "'register_hook'"),
    ],
)
def test_a_write_that_no_graph_holds_is_refused(function: Callable[..., Any], what: str) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        trace(fill(Between(function)), data(4, 4))
    assert "test_writes.py:" in str(caught.value)


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.l.weight.clamp_(-1, 1)
        return self.l(x)


def test_a_parameter_that_is_written_is_refused() -> None:
    model = fill(WritesParameter())
    version = model.l.weight._version
    with pytest.raises(TraceError, match="outside autograd") as caught:
        trace(model, data(4, 4))
    assert "self.l.weight.clamp_(-1, 1)" in str(caught.value)
    assert model.l.weight._version == version
