"""Elements chosen by a mask: written, computed on, and refused where their number matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import ops
from snnpart.errors import TraceError
from snnpart.trace import trace
from tests.neurons import data, fill
from tests.trace.parity import check
from tests.trace.test_writes import Between


def subtracts(x: Tensor) -> Tensor:
    v = x * 2
    fired = v > 0.3
    v[fired] -= 0.3
    v[~fired] *= 0.5
    return v


def fills(x: Tensor) -> Tensor:
    v = x * 2
    v[v > 0.4] = 0.0
    v[v < -0.4] = x.mean()
    return v


def computes(x: Tensor) -> Tensor:
    v, mask = x * 2, x > 0
    v[mask] = 2 * x[mask] / x.max() - v[mask].detach() + (-x[mask])
    return v


def keeps_what_was_chosen(x: Tensor) -> Tensor:
    v, mask = x * 2, x > 0
    before = v[mask].clone()
    before += 1
    v.zero_()
    v[mask] = before
    return v


def through_a_view(x: Tensor) -> Tensor:
    v = torch.zeros(2, *x.shape, dtype=x.dtype) + x
    v[1][x > 0] -= x.sum()
    return v.sum(0)


@pytest.mark.parametrize(
    "function", [subtracts, fills, computes, keeps_what_was_chosen, through_a_view], ids=lambda f: f.__name__
)
def test_equal_to_eager(function: Callable[..., Any]) -> None:
    graph = check(fill(Between(function)), data(4, 4) * 2, others=data(6, 4) * 2)
    names = {str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes}
    assert names & {"where", "masked_fill"}
    assert not any(node.target is ops.index_assign and isinstance(node.args[1], fx.Node) for node in graph.graph.nodes)


def stale(x: Tensor) -> Tensor:
    v = x * 2
    chosen = v[x > 0]
    v += 1
    v[x > 0] = chosen
    return v


def other_mask(x: Tensor) -> Tensor:
    v = x * 2
    v[x > 0] = x[x < 0]
    return v


@pytest.mark.parametrize(
    "function",
    [
        stale,
        other_mask,
        lambda x: x[x > 0],
        lambda x: x * x[x > 0].mean(),
        lambda x: x * len(x[x > 0]),
        lambda x: torch.stack([x[x > 0]]),
        lambda x: torch.sin(x[x > 0]),
        lambda x: x if x[x > 0] == 1 else -x,
        lambda x: 1 / x[x > 0],
        lambda x: x[x > 0] * x[x > 0],
        lambda x: x[x > 0][0] * x,
    ],
)
def test_what_depends_on_their_number_is_refused_at_the_line_that_chose(function: Callable[..., Any]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(fill(Between(function)), data(4, 4))
    text = str(caught.value)
    assert "'__getitem__' gives a result, or a shape, that depends on the data" in text and "test_masked.py:" in text


def test_a_frozen_buffer_written_through_a_mask_is_stored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            seen = self.get_buffer("seen")
            seen[x.detach().mean(0) > 0] += 1
            return self.l(x)

    check(fill(Counts().double()), data(5, 4))
