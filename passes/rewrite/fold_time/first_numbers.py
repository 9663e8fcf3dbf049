"""A state that begins as a Python number: the first step made to look like the others.

    v = 0.0
    for x in frames:
        v = 0.9 * v + x        # first step: add(%x, 0.0), as Python computes 0.9 * 0.0; then: add(%mul, %x)

torch adds a number to a tensor, not a tensor to a number, so that the operands of the first step lie the other way
round. Here the number becomes a tensor without dims, which is added like any other (and no more decides on the dtype
than the number did). Running sums begin with a number too, and are left as they are: `totals` knows them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.passes.rewrite.fold_time.columns import MODEL
from snnpart.passes.rewrite.fold_time.steps import Steps, key_of

_EITHER_WAY = (torch.add, torch.mul)


def put_in_place(steps: Steps) -> None:
    """Write the first step's `op(%x, number)` as `op(%number, %x)` where step 1 has `op(%carried, %x)`."""
    first, second, *_ = steps.nodes()
    models: dict[Hashable, fx.Node] = {key_of(node): node for node in second if _carries_first(node, steps)}
    for node in first:
        model = models.get(key_of(node))
        if model is not None and node is not model.args[0] and _adds_number(node):
            x, number = node.args
            node.args = (_tensor_of(number, node), x)


def _carries_first(node: fx.Node, steps: Steps) -> bool:
    """Whether the node reads a value of the step before, and then one of its own step."""
    two = node.target in _EITHER_WAY and len(node.args) == 2 and not node.kwargs
    return two and [steps.of.get(item) for item in node.args] == [MODEL - 1, MODEL]  # type: ignore[arg-type]


def _adds_number(node: fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    x, number = node.args
    return isinstance(x, fx.Node) and isinstance(number, (int, float)) and not isinstance(number, bool)


def _tensor_of(number: Any, reader: fx.Node) -> fx.Node:
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    with reader.graph.inserting_before(reader):
        made = reader.graph.call_function(torch.full, ((), number), {"dtype": dtype})
    facts.put(made, Value((), dtype, ()), facts.origin(reader))
    return made
