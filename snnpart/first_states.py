"""What a loop is first given as state: which number all of it is, where that can be told from how it is made.

Filled tensors (`zeros_like`, `full`) are one number, and so are their parts and what arithmetic makes of such: of
`v = decay * v + x` with v from zeros, fold-time carries `decay * v` and begins with `decay * zeros`. Zero times what
every step reads is zero, as that is a finite number in any network that can be trained.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from snnpart.step_code import FILLED

_ARITHMETIC: dict[Any, Callable[..., float]] = {
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.rsub: lambda a, b: b - a,
    torch.mul: operator.mul,
    torch.div: operator.truediv,
    torch.neg: operator.neg,
}
_READS = (operator.getitem, torch.select, torch.unbind, torch.movedim, torch.transpose)


def start_number(node: fx.Node, fixed: Collection[Any] = ()) -> float | None:
    """The number that every element of a tensor is; None where that is not known.

    Args:
        fixed: the values that each step of the loop reads.
    """
    if node.target in _ARITHMETIC:
        return _of_arithmetic(node, fixed)
    if node.target in (operator.getitem, torch.select) and isinstance(node.args[0], fx.Node):
        return start_number(node.args[0], fixed)
    name = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in ("full", "full_like", "new_full"):
        value: Any = node.args[-1] if len(node.args) > 1 else node.kwargs.get("fill_value")
        return float(value) if isinstance(value, (int, float)) else None
    return FILLED.get(name)


def _of_arithmetic(node: fx.Node, fixed: Collection[Any]) -> float | None:
    numbers = [start_number(item, fixed) if isinstance(item, fx.Node) else item for item in node.args]
    if node.target is torch.mul and 0.0 in numbers and any(item in fixed for item in node.args):
        return 0.0
    plain = not node.kwargs and all(isinstance(number, (int, float)) for number in numbers)
    return float(_ARITHMETIC[node.target](*numbers)) if plain and not _by_zero(node, numbers) else None


def _by_zero(node: fx.Node, numbers: list[Any]) -> bool:
    return node.target is torch.div and numbers[1] == 0


def own_start(start: fx.Node) -> tuple[fx.Node, ...]:
    """Copies, right before `start`, of the nodes that make a first state of numbers, and of the reads of frames
    whose shape it has; the last one is to be read instead of `start`."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in _makers(start):
        with start.graph.inserting_before(start):
            copies[node] = start.graph.node_copy(node, lambda item: copies.get(item, item))
    return tuple(copies.values())


def _makers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes in order."""
    seen: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in seen and (source.target in _READS or start_number(source) is not None):
                visit(source)
        seen[node] = None

    visit(node)
    yield from seen
