"""Running sums: acc = acc + y, of which only the last value is read, is a sum over the steps.

Step 0 may be y itself, y plus a number (`0. + y`), or acc + y with an acc from outside the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.passes.rewrite.fold_time.columns import Column, Columns, Path

Found = tuple[Path, fx.Node, Any]


def sum_of(columns: Columns) -> Callable[[Column], Found]:
    """For a column that is a running sum: path and node of y, and what the sum begins with (None: nothing)."""

    def found(column: Column) -> Found:
        it = _find(column, columns)
        assert it is not None
        return it

    return found


def is_running_sum(column: Column, columns: Columns) -> bool:
    """Whether the column is a running sum whose last value alone is read."""
    return _find(column, columns) is not None and _only_last_is_read(column)


def _find(column: Column, columns: Columns) -> Found | None:
    model = column.model
    if model.target is not torch.add or model.kwargs or len(column.carried) != 1 or len(model.args) != 2:
        return None
    (path,) = column.carried
    other = 1 - path[1]
    term = model.args[other]
    if column.carried[path] is not column or not isinstance(term, fx.Node) or term not in columns.of:
        return None
    if columns.of[term][0] is column or not _same_type(facts.get(model, Value), facts.get(term, Value)):
        return None
    start = _start(column, path, columns.of[term][0].at(0))
    return None if start is _UNKNOWN else ((0, other), term, start)


_UNKNOWN = object()


def _same_type(acc: Value | None, term: Value | None) -> bool:
    return (
        acc is not None
        and term is not None
        and (acc.shape, acc.slopes, acc.dtype) == (term.shape, term.slopes, term.dtype)
        and acc.dtype.is_floating_point
    )


def _start(column: Column, path: Path, first_term: fx.Node | None) -> Any:
    begin = column.nodes[0]
    if begin is not None:
        return begin.args[path[1]]
    if column.first is first_term:
        return None
    number = _added_number(column.first, first_term)
    return _UNKNOWN if number is None else number


def _added_number(node: fx.Node | None, term: fx.Node | None) -> float | None:
    """The number c of `add(term, c)`; None when the node is something else."""
    if node is None or node.target is not torch.add or len(node.args) != 2 or node.kwargs:
        return None
    x, number = node.args
    if x is not term or isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return float(number)


def _only_last_is_read(column: Column) -> bool:
    own = {node for node in column.nodes if node is not None}
    last = column.nodes[-1]
    readers = {user for node in own - {last} for user in node.users}
    return last is not None and readers <= own
