"""The text of operations that a kernel's language has no word for, run in plain torch beside the operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from snnpart.step_run import _run

aten = torch.ops.aten
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "atan": torch.atan,
    "atan, in place": lambda x: x.clone().atan_(),
    "erfc": torch.erfc,
    "erfc, in place": lambda x: x.clone().erfc_(),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x),
    "leaky_relu with a slope": lambda x: torch.nn.functional.leaky_relu(x, 0.3),
    "leaky_relu, backward": lambda x: aten.leaky_relu_backward(x + 2.0, x, 0.3, False),
}
POWERS = (-12.0, -3.3, -1.5, -1.0, -0.5, 0.5, 0.7, 1.5, 2.5, 3.0, 8.5, 9.0, 13.0, 13.5)
SIZES = (0.0, 1e-12, 1e-5, 0.3, 0.65, 0.67, 1.0, 1.1, 2.3, 2.5, 4.0, 7.0, 300.0, 1e12)


def check(function: Callable[[Tensor], Tensor], x: Tensor, limit: float) -> None:
    graph = make_fx(function)(x).graph
    (found,) = _run(graph_of_tuple(graph), (x,), x)
    wanted = function(x)
    assert bool((found.isfinite() == wanted.isfinite()).all())
    real = wanted.isfinite()
    assert torch.equal(found[~real].nan_to_num(7.0), wanted[~real].nan_to_num(7.0))
    error = (found - wanted)[real].abs() / wanted[real].abs().clamp_min(1.0)
    assert float(error.max()) < limit


def graph_of_tuple(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with its result as a tuple, as steps have it."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = ((output.args[0],),)
    return graph


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-15), (torch.float32, 5e-7)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_computed_as_torch_computes_them(name: str, dtype: torch.dtype, limit: float) -> None:
    sizes = torch.tensor(SIZES, dtype=dtype)
    x = torch.cat([sizes, -sizes, torch.linspace(-5, 5, 1001, dtype=dtype), sizes.new_tensor([float("inf")])])
    check(OPERATIONS[name], x, limit)


@pytest.mark.parametrize("exponent", POWERS)
@pytest.mark.parametrize("in_place", [False, True])
def test_powers_are_those_of_torch_also_of_zero_and_of_negative_numbers(exponent: float, in_place: bool) -> None:
    """Of a negative number there is none where the exponent is not whole."""
    function = (lambda x: x.clone().pow_(exponent)) if in_place else (lambda x: x.pow(exponent))
    x = torch.cat([torch.tensor([0.0, 1e-3]), torch.linspace(-6, 6, 601)]).double()
    check(function, x, 1e-13)
