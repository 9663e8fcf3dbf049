"""Where the loop meets what is around it: steps taken from a tensor, and steps put together into one.

`x[:, t]` for all t is a view of x with its time dim in front; `x[t - 2]`, which begins at the end, and
`x[max(t - 2, 0)]` are two, one behind the other. `torch.stack` and `torch.cat` of all steps' values are
views of the stacked value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import argument
from snnpart.passes.rewrite.fold_time.columns import Column
from snnpart.passes.rewrite.fold_time.emit import Emitter, Folded, over_steps

_VIEWS = 2
"""Of which the steps that are taken from a tensor may consist: more would be a graph that grows with the steps."""


@dataclass(frozen=True)
class _Taken:
    """Index `indices[t]` of dim `dim` of `source` is taken at step t, and `rest` of what remains."""

    source: fx.Node
    dim: int
    indices: list[int]
    rest: tuple[Any, ...] = ()


def is_view(column: Column) -> bool:
    """Whether the steps that the column takes are a view of a tensor, or two."""
    return _taken(column) is not None


def emit_slices(emitter: Emitter, column: Column) -> None:
    """All steps that the column takes, stacked."""
    taken = _taken(column)
    assert taken is not None
    node, value, like = emitter.value(taken.source), facts.need(taken.source, Value), column.model
    if taken.dim:
        value = _moved(value, taken.dim, 0)
        node = emitter.add(torch.movedim, (node, taken.dim, 0), value, like)
    node = _in_order(emitter, node, value, taken.indices, like)
    out = facts.need(column.model, Value)
    if any(item != slice(None) for item in taken.rest):
        node = emitter.add(operator.getitem, (node, (slice(None), *taken.rest)), over_steps(out, emitter.steps), like)
    emitter.folded[column] = Folded(out, stacked=node)


def _taken(column: Column) -> _Taken | None:
    model, path = column.model, next(iter(column.indices))
    source = model.args[0]
    missing = [node is None for node in column.nodes]
    if len(column.indices) != 1 or missing != sorted(missing) or not isinstance(source, fx.Node):
        return None
    found = _place(model, source, path)
    value = facts.get(found[0], Value) if found is not None else None
    if found is None or value is None or value.slopes[found[1]]:
        return None
    size = value.shape[found[1]]
    indices = _lengthened([index % size for index in column.indices[path]], len(column.nodes), size)
    return _Taken(found[0], found[1], indices, found[2]) if len(list(_runs(indices))) <= _VIEWS else None


def _lengthened(indices: list[int], steps: int, size: int) -> list[int]:
    """The indices with some for the last steps, which read nothing: they go on as before where that is inside the
    tensor."""
    distance = indices[-1] - indices[-2] if len(indices) > 1 else 0
    end = indices[-1] + distance * (steps - len(indices))
    distance = distance if 0 <= end < size else 0
    return indices + [indices[-1] + distance * more for more in range(1, steps - len(indices) + 1)]


def _place(model: fx.Node, source: fx.Node, path: Any) -> tuple[fx.Node, int, tuple[Any, ...]] | None:
    """Source, dim and the rest of the index."""
    if model.target is torch.select:
        return source, argument(model, 1, "dim"), ()
    if kinds.value_of(source) is None:
        whole = source.args[0] if kinds.name_of(source) == "unbind" else None
        return (whole, argument(source, 1, "dim", 0), ()) if isinstance(whole, fx.Node) else None
    if path == (0, 1):
        return source, 0, ()
    if isinstance(model.args[1], slice):
        return None
    at, index = path[2], tuple(model.args[1])  # type: ignore[arg-type]
    if any(item != slice(None) for item in index[:at]) or not all(isinstance(i, (int, slice)) for i in index):
        return None
    return source, at, (*index[:at], *index[at + 1 :])


def _moved(value: Value, source: int, target: int) -> Value:
    order = [d for d in range(len(value.shape)) if d != source]
    order.insert(target, source)
    stride = tuple(value.stride[d] for d in order) if value.stride else ()
    shape, slopes = tuple(value.shape[d] for d in order), tuple(value.slopes[d] for d in order)
    return replace(value, shape=shape, slopes=slopes, stride=stride)


def _runs(indices: list[int]) -> Iterator[list[int]]:
    """The indices cut where their distance changes."""
    run = indices[:1]
    for index in indices[1:]:
        if len(run) > 1 and index - run[-1] != run[1] - run[0]:
            yield run
            run = []
        run = [*run, index]
    yield run


def _in_order(emitter: Emitter, node: fx.Node, value: Value, indices: list[int], like: fx.Node) -> fx.Node:
    """The entries `indices` of dim 0."""
    if indices == list(range(value.shape[0])):
        return node
    parts = [_evenly(emitter, node, value, run, like) for run in _runs(indices)]
    return parts[0] if len(parts) == 1 else emitter.add(torch.cat, (parts, 0), _so_many(value, len(indices)), like)


def _evenly(emitter: Emitter, node: fx.Node, value: Value, run: list[int], like: fx.Node) -> fx.Node:
    """The entries `run` of dim 0, which lie at equal distances, or are all the same."""
    distance = run[1] - run[0] if len(run) > 1 else 1
    low, high, many = min(run), max(run), _so_many(value, len(run))
    taken = _so_many(value, 1) if not distance else many
    node = emitter.add(operator.getitem, (node, (slice(low, high + 1, abs(distance) or 1),)), taken, like)
    if not distance:
        return emitter.add("expand", (node, (len(run), *(-1,) * (len(value.shape) - 1))), many, like)
    return emitter.add(torch.flip, (node, (0,)), many, like) if distance < 0 else node


def _so_many(value: Value, count: int) -> Value:
    return replace(value, shape=(count, *value.shape[1:]), stride=())


def emit_together(emitter: Emitter, node: fx.Node) -> bool:
    """Emit a stack or cat of all steps' values of one column as a view of them; False when the node is none."""
    column = _all_steps(emitter, node)
    if column is None:
        return _emit_behind(emitter, node)
    dim, out = argument(node, 1, "dim", 0), facts.need(node, Value)
    if kinds.name_of(node) == "stack":
        made = emitter.stacked(column)
        if dim:
            made = emitter.add(torch.movedim, (made, 0, dim), replace(out, stride=()), node, node.name)
    elif dim == 0:
        made = emitter.merged(column)
    else:
        made = _merged_at(emitter, column, dim, out, node)
    emitter.plain[node] = made
    return True


def _emit_behind(emitter: Emitter, node: fx.Node) -> bool:
    """Emit a stack of one or two values and, behind them, a column's from step 0 on: what each step begins with."""
    found = _behind(emitter, node)
    if found is None:
        return False
    column, first, count = found
    out, dim, value = facts.need(node, Value), argument(node, 1, "dim", 0), emitter.folded[column].value
    head = emitter.add(torch.stack, ([emitter.value(item) for item in first], 0), over_steps(value, len(first)), node)
    rest = _evenly(emitter, emitter.stacked(column), over_steps(value, emitter.steps), list(range(count)), node)
    whole = replace(over_steps(value, len(first) + count), requires_grad=out.requires_grad)
    made = emitter.add(torch.cat, ((head, rest), 0), whole, node, None if dim else node.name)
    if dim:
        made = emitter.add(torch.movedim, (made, 0, dim), replace(out, stride=()), node, node.name)
    emitter.plain[node] = made
    return True


def _behind(emitter: Emitter, node: fx.Node) -> tuple[Column, list[fx.Node], int] | None:
    """The column, the values before it, and how many of its steps the stack holds: all but two at least."""
    items = node.args[0] if node.target is torch.stack else None
    if not isinstance(items, (tuple, list)) or not items or items[-1] not in emitter.columns.of:
        return None
    column, last = emitter.columns.of[items[-1]]  # type: ignore[index]
    first = len(items) - last - 1
    if not 0 < first <= _VIEWS or last + 1 < max(2, emitter.steps - _VIEWS) or emitter.folded[column].stacked is None:
        return None
    if any(column.at(step) is not item for step, item in enumerate(items[first:])):
        return None
    return column, list(items[:first]), last + 1  # type: ignore[arg-type]


def _merged_at(emitter: Emitter, column: Column, dim: int, out: Value, node: fx.Node) -> fx.Node:
    value = _moved(over_steps(emitter.folded[column].value, emitter.steps), 0, dim)
    moved = emitter.add(torch.movedim, (emitter.stacked(column), 0, dim), value, node)
    return emitter.add(torch.flatten, (moved, dim, dim + 1), replace(out, stride=()), node, node.name)


def _all_steps(emitter: Emitter, node: fx.Node) -> Column | None:
    """The column whose values at all steps, in order, the node joins."""
    if node.target not in (torch.stack, torch.cat) or not isinstance(node.args[0], (tuple, list)):
        return None
    items = node.args[0]
    last = items[-1] if items else None
    if not isinstance(last, fx.Node) or len(items) != emitter.steps or last not in emitter.columns.of:
        return None
    column, _ = emitter.columns.of[last]
    if any(column.at(step) is not item for step, item in enumerate(items)):
        return None
    return column
