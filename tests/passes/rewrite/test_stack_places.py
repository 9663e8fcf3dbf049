"""stack-places: what is filled place by place is a stack, bit for bit; what is not stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import ops
from snnpart.compilation import Options, compile_program
from snnpart.graph import SpikeGraph
from snnpart.ops_fused import FusedNeuron
from snnpart.ops_time import Loop
from snnpart.pass_manager import PassManager
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.passes.rewrite.stack_places import StackPlaces
from tests.graphs import assert_equal, calls, execute, graph_of
from tests.nets import Spike

X = torch.randn(3, 2, 4, dtype=torch.float64)


def rewritten(function: Callable[[Tensor], Any], x: Tensor = X, batch: int = 1) -> SpikeGraph:
    """The graph after the pass, which computes what it did before."""
    before = graph_of(function, x, in_dims=batch)
    PassManager((Canonicalize(),)).run(before)
    after = before.copy()
    PassManager((StackPlaces(),)).run(after)
    assert_equal(execute(before, [x]), execute(after, [x]))
    return after


def filled(begin: Callable[[Tensor], Tensor], dim: int) -> Callable[[Tensor], Tensor]:
    """All places of a dim, each with another row of the input."""

    def function(x: Tensor) -> Tensor:
        out = begin(x)
        for t in range(x.shape[0]):
            at: list[Any] = [slice(None)] * out.dim()
            at[dim] = t
            out[tuple(at)] = x[t] * (t + 1.5)
        return out * 2

    return function


BEGINS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "zeros": (lambda x: torch.zeros(x.shape, dtype=x.dtype), 0),
    "zeros, last dim": (lambda x: torch.zeros(*x.shape[1:], x.shape[0], dtype=x.dtype), 2),
    "empty like x": (torch.empty_like, 0),
    "new zeros": (lambda x: x.new_zeros(x.shape[1], x.shape[0], x.shape[2]), 1),
}


@pytest.mark.parametrize("name", BEGINS)
def test_a_tensor_of_which_every_place_is_filled_is_a_stack(name: str) -> None:
    begin, dim = BEGINS[name]
    graph = rewritten(filled(begin, dim))
    (stack,) = calls(graph, torch.stack)
    assert stack.args[1] == dim and not calls(graph, ops.index_assign)


def test_places_that_are_read_on_the_way_are_what_fills_them() -> None:
    """One that is not yet filled is read from the tensor as it was made; a place filled twice is what came last."""

    def function(x: Tensor) -> Tensor:
        out = torch.full((2, 4, 3), 0.5, dtype=x.dtype)
        for t in range(3):
            out[..., t] = x[t] * out[..., max(t - 1, 0)] + out[..., 2]
        out[..., -1] = out[..., 2] - 1
        return out

    graph = rewritten(function)
    (stack,) = calls(graph, torch.stack)
    assert stack.args[1] == 2 and not calls(graph, ops.index_assign)


def partly(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[0], out[2] = x[0] * 2, x[1]
    return out + 1


def of_slices(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[0], out[1:] = x[0] * 2, x[1:] * 3
    return out + 1


def spread(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(3):
        out[t] = x[t, 0]
    return out + 1


def of_another_type(x: Tensor) -> Tensor:
    out = torch.zeros(3, 2, 4)
    for t in range(3):
        out[t] = x[t]
    return out + 1


def computed(x: Tensor) -> Tensor:
    out = x * 2
    for t in range(3):
        out[t] = x[t] + out[t]
    return out + 1


@pytest.mark.parametrize("function", [partly, of_slices, spread, of_another_type, computed])
def test_other_tensors_stay(function: Callable[[Tensor], Tensor]) -> None:
    """Some places, several at once, values that are spread or cast, a tensor that is made of others."""
    graph = rewritten(function)
    assert calls(graph, ops.index_assign) and not calls(graph, torch.stack)


def test_places_of_the_batch_stay() -> None:
    """There may be more samples than in the example."""

    def function(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[0], out[1], out[2] = x[0] * 2, x[1] * 3, x[2] * 4
        return out + 1

    graph = rewritten(function, batch=0)
    assert calls(graph, ops.index_assign) and not calls(graph, torch.stack)


@pytest.mark.parametrize("begin", [lambda y: torch.zeros(2, 5, 3), lambda y: y.new_zeros(2, 5, 3)])
def test_under_autocast_it_has_the_dtype_that_the_tensor_had(begin: Callable[[Tensor], Tensor]) -> None:
    """One that is made of its own has its own, one that is made like a result has the result's."""
    layer = nn.Linear(4, 5)

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        out = begin(y)
        for t in range(3):
            out[..., t] = y[t]
        return out

    graph = graph_of(function, X.float(), layers={"layer": layer}, in_dims=1)
    PassManager((Canonicalize(), StackPlaces())).run(graph)
    assert len(calls(graph, torch.stack)) == 1
    with torch.autocast("cpu", torch.bfloat16):
        found = execute(graph, [X.float()])["output0"]
        y = layer(X.float())
        assert found.dtype == begin(y).dtype and torch.equal(found, torch.stack(list(y), -1).to(found.dtype))


class TimeLast(nn.Module):
    """Time in the last dim, states that read the spikes of the step before where they were put (tdBN's networks)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm3d(5)
        with torch.no_grad():
            self.norm.bias.fill_(0.4)

    def forward(self, x: Tensor) -> Tensor:
        steps, current = x.shape[-1], torch.zeros(x.shape[0], 5, *x.shape[2:], dtype=x.dtype)
        for t in range(steps):
            current[..., t] = self.conv(x[..., t])
        current = self.norm(current)
        u, out = torch.zeros(current.shape[:-1], dtype=x.dtype), torch.zeros(current.shape, dtype=x.dtype)
        for t in range(steps):
            u = 0.25 * u * (1 - out[..., max(t - 1, 0)]) + current[..., t]
            out[..., t] = Spike.apply(u - 0.5)
        return out


def test_a_network_with_time_in_its_last_dim_folds_and_fuses() -> None:
    """The gate compares it with the module."""
    torch.manual_seed(0)
    net, x = TimeLast().double(), torch.rand(2, 3, 6, 6, 5, dtype=torch.float64)
    assert 0.01 < float(net(x).detach().mean()) < 0.99
    program, _ = compile_program(net, x, Options(input_layout="NCHWT", fuse=True))
    targets = [node.target for node in program.stages[0, 0].graph.nodes]
    assert sum(isinstance(target, FusedNeuron) for target in targets) == 1
    assert targets.count(torch.conv2d) == 1 and not any(isinstance(target, Loop) for target in targets)
