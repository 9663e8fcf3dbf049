"""One graph for every batch size, found from two sizes; or a reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import facts, ops
from snnpart.facts import Value
from snnpart.graph import BATCH_SIZE, SpikeGraph
from snnpart.trace import trace
from tests.neurons import LIF, Spike, data, fill
from tests.trace.parity import check


def affines(graph: SpikeGraph) -> list[tuple[int, int]]:
    return [node.args[1:] for node in graph.graph.nodes if node.target is ops.affine]  # type: ignore[misc]


class Merging(nn.Module):
    """[T, N, C] merged to [T*N, C] and back; state of a size that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        t, n, c = x.shape
        y = self.l(x.reshape(t * n, c)).view(t, n, -1)
        v, outs = torch.zeros(n, 6, dtype=x.dtype), []
        for step in y:
            v = 0.5 * v + step
            outs.append(Spike.apply(v - 0.2))
        return self.out(torch.stack(outs).mean(0)) / n


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_sizes_become_affine(batch: int) -> None:
    graph = check(fill(Merging()), data(4, batch, 4) * 2, in_dims=1, others=data(4, 7, 4))
    assert sorted(affines(graph)) == [(1, 0), (4, 0)]
    placeholders = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    assert placeholders == ["x", BATCH_SIZE]
    merged = next(node for node in graph.graph.nodes if node.target is F.linear or "linear" in node.name)
    assert facts.need(merged, Value).slopes == (4, 0) and facts.need(merged, Value).shape == (4 * batch, 6)


def test_no_size_no_placeholder() -> None:
    graph = check(fill(nn.Sequential(nn.Linear(4, 6), LIF())), data(3, 4), others=data(5, 4))
    assert not affines(graph) and [n.target for n in graph.graph.nodes if n.op == "placeholder"] == ["input"]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        return (x.unsqueeze(0) + x.unsqueeze(1)).reshape(n * n, -1).sum(0, keepdim=True) + x


class Offset(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        padded = torch.cat([x, torch.ones(1, x.shape[1], dtype=x.dtype)])
        return padded.view(n + 1, -1)[:n] * 2


def test_a_size_that_is_no_line_fixes_the_batch() -> None:
    graph = check(Square(), data(4, 3))
    assert "Square" not in graph.batch_fixed and "linear" in graph.batch_fixed
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert not affines(graph) and not any(facts.need(node, Value).slopes[0] for node in inputs)


def test_a_size_with_an_offset() -> None:
    graph = check(Offset(), data(4, 3), others=data(9, 3))
    assert (1, 1) in affines(graph)


class Unbiased(nn.Module):
    """A norm by hand: `n` is a float, as `/` gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        n = x.numel() / x.size(1)
        with torch.no_grad():
            self.seen = 0.9 * self.seen + 0.1 * x.var(0, unbiased=False) * n / (n - 1)
        return x * 2


def test_a_float_made_of_a_size() -> None:
    graph = check(Unbiased(), data(4, 3), others=data(9, 3))
    assert affines(graph) == [(1.0, 0.0), (1.0, -1.0)] and graph.batch_fixed == ""


class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 / x.shape[0])


def test_a_float_that_is_no_line_fixes_the_batch() -> None:
    graph = check(nn.Sequential(nn.Identity(), Inverse()), data(4, 3))
    assert "0.25 at batch 4" in graph.batch_fixed or "linear" in graph.batch_fixed
    assert not affines(graph)


BATCH = 4


class ClosedOver(nn.Module):
    """B15: the batch size is a constant of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x.view(BATCH, -1))


def test_a_closed_over_batch_size_is_reported_with_its_line() -> None:
    graph = check(fill(ClosedOver()), data(4, 2, 2))
    assert "x.view(BATCH, -1)" in graph.batch_fixed and "test_batches.py" in graph.batch_fixed
    assert [a.text for a in graph.assumptions if a.kind == "batch"] == [f"the batch size is fixed: {graph.batch_fixed}"]
    assert graph.outputs[0].batch_dim == 0


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])


class Averages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 / x.shape[0])


class Ones(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze() * 2 if x.shape[0] == 1 else x * 2


@pytest.mark.parametrize(("model", "batch"), [(Loops(), 3), (Averages(), 3), (Ones(), 1)])
def test_code_that_depends_on_the_batch_fixes_it(model: nn.Module, batch: int) -> None:
    graph = check(model, data(batch, 3))
    assert "test_batches.py" in graph.batch_fixed and graph.batch == batch


def test_no_batch_at_all() -> None:
    graph = check(fill(nn.Sequential(nn.Linear(4, 2), LIF())), data(4), in_dims=[None])
    assert graph.batch_fixed == "no input has a batch dim" and graph.outputs[0].batch_dim is None


class Image(nn.Module):
    """A convolution stem, pooling, flatten(1): the batch grows every value's first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Any:
        y = F.max_pool2d(Spike.apply(self.bn(self.conv(x))), 2)
        return self.fc(y.flatten(1)), y.mean((2, 3)).unsqueeze(0).expand(2, -1, -1)


def test_every_value_has_slopes() -> None:
    graph = check(fill(Image()), data(3, 1, 6, 6) * 2, others=data(5, 1, 6, 6))
    values = [facts.get(node, Value) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    assert all(v is None or v.slopes.count(1) == 1 for v in values)
    assert [o.batch_dim for o in graph.outputs] == [0, 1]


class Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        return x.permute(1, 0, 2).contiguous().view(t * n, c) * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_contiguous_does_nothing_at_batch_1_and_copies_at_others(batch: int) -> None:
    graph = trace(Permuted(), data(batch, 4, 3), out_dims=0)
    assert not graph.batch_fixed and affines(graph) == [(4, 0)]
