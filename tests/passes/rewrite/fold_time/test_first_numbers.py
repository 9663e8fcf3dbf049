"""A state that begins as a Python number is one loop with its first step; running sums stay sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.ops_time import Loop
from tests.graphs import Wrap
from tests.passes.rewrite.fold_time.nets import spike
from tests.passes.rewrite.fold_time.parity import active, check, images, repeated


def leaky(v: Any, x: Tensor) -> Any:
    return 0.5 * v + x


def mirrored(v: Any, x: Tensor) -> Any:
    return x + 0.5 * v


def scaled(v: Any, x: Tensor) -> Any:
    """The state multiplies."""
    return (v + 1.0) * x


def network(update: Callable[[Any, Tensor], Any], begin: Any) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        v, out = begin, []
        for t in range(4):
            v = update(v, m.fc(x[:, t]))
            s = spike(v - 0.4)
            v = v - 0.3 * s
            out.append(m.out(s))
        return torch.stack(out)

    torch.manual_seed(0)
    return active(Wrap(forward, fc=nn.Linear(6, 5), out=nn.Linear(5, 3)))


@pytest.mark.parametrize("begin", [0.0, 0, 0.3, 2])
@pytest.mark.parametrize("update", [leaky, mirrored, scaled])
def test_the_first_step_is_one_of_the_loop(update: Callable[[Any, Tensor], Any], begin: Any) -> None:
    """The number is what the loop is first given; there is no first step of its own."""
    folded = check(network(update, begin), images(3, 4, 6))
    (loop,) = (node.target for node in folded.graph.nodes if isinstance(node.target, Loop))
    assert not repeated(folded) and loop.first is None


def test_a_running_sum_stays_one() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        total: Any = 0.0
        for t in range(4):
            total = total + m.out(torch.relu(m.fc(x[:, t])))
        return total / 4  # type: ignore[no-any-return]

    torch.manual_seed(0)
    folded = check(Wrap(forward, fc=nn.Linear(6, 5), out=nn.Linear(5, 3)).double(), images(3, 4, 6), fires=False)
    assert not any(isinstance(node.target, Loop) or node.target is torch.full for node in folded.graph.nodes)
