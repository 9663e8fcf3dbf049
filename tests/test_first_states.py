"""Which number all of a loop's first state is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from snnpart.first_states import own_start, start_number
from snnpart.pass_manager import PassManager
from snnpart.passes.rewrite.canonicalize import Canonicalize
from tests.graphs import graph_of

X = torch.rand(4, 2, 3)


def made(function: Callable[..., Tensor]) -> fx.Node:
    """The node of a function's result, in canonical form."""
    graph = graph_of(function, X, torch.rand(3), in_dims=(1, None))
    PassManager((Canonicalize(),)).run(graph)
    (end,) = next(iter(reversed(graph.graph.nodes))).all_input_nodes
    return end


NUMBERS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "zeros": (lambda x, p: torch.zeros(2, 3), 0.0),
    "ones like a frame": (lambda x, p: torch.ones_like(x[0]), 1.0),
    "a part of zeros": (lambda x, p: torch.zeros(2, 3, 4)[..., 0], 0.0),
    "filled": (lambda x, p: torch.full((2, 3), 0.25), 0.25),
    "decayed": (lambda x, p: 0.5 * torch.full((2, 3), 0.25), 0.125),
    "one less zero": (lambda x, p: 1 - torch.zeros_like(x[0]), 1.0),
    "a product of two": (lambda x, p: 0.5 * torch.ones(2, 3) * (1 - torch.zeros(2, 3)), 0.5),
    "halved and negated": (lambda x, p: -(torch.ones(2, 3) / 2), -0.5),
    "zero times what is fixed": (lambda x, p: torch.zeros_like(x[0]) * p, 0.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_arithmetic_with_filled_tensors_is_a_number(name: str) -> None:
    function, number = NUMBERS[name]
    node = made(function)
    fixed = [item for item in node.graph.nodes if item.op == "placeholder"][1:]
    assert start_number(node, fixed) == number


@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: torch.ones_like(x[0]) * p,
        lambda x, p: torch.zeros_like(x[0]) + p,
        lambda x, p: torch.zeros_like(x[0]) * x[1],
        lambda x, p: torch.ones(2, 3) / 0,
        lambda x, p: torch.rand_like(x[0]),
        lambda x, p: x[0] * 0.0,
    ],
)
def test_what_is_computed_of_other_values_is_none(function: Callable[..., Tensor]) -> None:
    node = made(function)
    assert start_number(node, [item for item in node.graph.nodes if item.op == "placeholder"][1:]) is None


def test_an_own_start_reads_nothing_that_was_made_for_others() -> None:
    """The frame whose shape it has is read once more; what others read stays."""
    node = made(lambda x, p: torch.zeros_like(x.exp()[0]) * 0.5)
    own = own_start(node)
    assert [item.op for item in own] == ["call_function"] * 3 and own[-1].target is torch.mul
    assert all(source in own or source.target is torch.exp for item in own for source in item.all_input_nodes)
    assert start_number(own[-1]) == 0.0
