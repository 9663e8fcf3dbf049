"""Sizes, and the number that fills a tensor, given as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import facts
from snnpart.errors import TraceError
from snnpart.facts import Value
from snnpart.trace import trace
from tests.neurons import data, fill
from tests.trace.parity import check


class Sized(nn.Module):
    """A network that keeps its width and its resting value as tensors, which are neither parameters nor buffers."""

    def __init__(self, start: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.start = nn.Linear(4, 4), nn.Linear(4, 3), start
        self.width, self.rest = torch.as_tensor(4), torch.tensor(0.25, dtype=torch.float64)
        self.small, self.yes = torch.tensor(3, dtype=torch.int32), torch.tensor(True)
        self.turn = torch.tensor(0.5 + 0.25j, dtype=torch.complex128)
        self.learned = nn.Parameter(torch.tensor(0.5))
        self.kind = torch.float64

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(self.start(self, y) * y.sigmoid() + y)


STARTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ones": lambda m, y: torch.ones(y.shape[0], m.width, dtype=m.kind),
    "a tuple": lambda m, y: torch.zeros((*y.shape[:-1], m.width), dtype=m.kind) + 1,
    "by name": lambda m, y: torch.ones(size=(y.shape[0], m.width), dtype=m.kind),
    "new": lambda m, y: y.new_ones(len(y), m.width),
    "view": lambda m, y: y.view(-1, m.width),
    "expand": lambda m, y: m.rest.expand(len(y), m.width),
    "full": lambda m, y: torch.full(y.shape, m.rest, dtype=m.kind),
    "full, of all": lambda m, y: torch.full((y.shape[0], m.width), m.rest.detach(), device=y.device, dtype=y.dtype),
    "full, by name": lambda m, y: torch.full(size=y.shape, fill_value=m.rest, dtype=m.kind),
    "full of a parameter": lambda m, y: torch.full(y.shape, m.learned.detach(), dtype=m.kind) * m.learned,
    "full of a number": lambda m, y: torch.full(y.shape, 0.25, dtype=m.kind),
    "full, a leaf": lambda m, y: torch.full(y.shape, m.rest, dtype=m.kind, requires_grad=True),
    "full without a dtype": lambda m, y: torch.full(y.shape, m.rest).double(),
    "full of an integer": lambda m, y: torch.full(y.shape, m.width).double(),
}


FILLED: dict[str, tuple[Callable[[Any, Tensor], Tensor], torch.dtype]] = {
    "an integer": (lambda m, y: torch.full(y.shape, m.width), torch.int64),
    "a small integer": (lambda m, y: torch.full(y.shape, m.small), torch.int64),
    "a truth": (lambda m, y: torch.full(y.shape, m.yes), torch.bool),
    "a float": (lambda m, y: torch.full(y.shape, m.rest), torch.float32),
    "a complex": (lambda m, y: torch.full(y.shape, m.turn), torch.complex64),
    "an integer as truth": (lambda m, y: torch.full(y.shape, m.small, dtype=torch.bool), torch.bool),
    "a float as truth": (lambda m, y: torch.full(y.shape, m.rest, dtype=torch.bool), torch.bool),
    "a truth as integer": (lambda m, y: torch.full(y.shape, m.yes, dtype=torch.int32), torch.int32),
    "an integer as float": (lambda m, y: torch.full(y.shape, m.small, dtype=torch.float64), torch.float64),
    "a float as complex": (lambda m, y: torch.full(y.shape, m.rest, dtype=torch.complex128), torch.complex128),
}


@pytest.mark.parametrize("name", FILLED)
def test_the_dtype_is_that_of_full(name: str) -> None:
    made, dtype = FILLED[name]
    net = fill(Sized(lambda m, y: made(m, y).real.double()))
    assert made(net, data(3, 4)).dtype is dtype
    graph = check(net, data(3, 4), others=data(5, 4))
    (number,) = [node for node in graph.graph.nodes if node.target is torch.add and _holds(node.args[0])]
    assert facts.need(number, Value).dtype is dtype


def _holds(made: Any) -> bool:
    return isinstance(made, fx.Node) and made.target is torch.zeros


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.filterwarnings("ignore:.*requires_grad=True to a scalar")
def test_tensors_made_with_tensors(name: str) -> None:
    """For another batch size too: the width alone is a constant."""
    net = fill(Sized(STARTS[name]))
    check(net, data(3, 4), others=data(5, 4))


def test_what_was_read_is_an_assumption() -> None:
    graph = trace(fill(Sized(STARTS["ones"])), data(3, 4))
    assert [a.text for a in graph.assumptions if a.kind == "constant"] == [
        "the value of width was read as a Python value ('a size')"
    ]


@pytest.mark.parametrize(
    "start",
    [
        lambda m, y: y.new_ones((y > 0).sum(), m.width).mean(),
        lambda m, y: torch.ones(y.shape[0], m.width // 2 * 2, dtype=m.kind),
    ],
)
def test_a_size_that_is_computed_from_tensors_is_refused(start: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"test_factories.py:(.|\n)*values of a tensor here \('a size'\)"):
        trace(fill(Sized(start)), data(3, 4))
