"""The new graph: every part in the form it runs in, and the values of a column in whichever form they are asked for.

A column's values exist *once* (equal at all steps), *merged* [T*N, ...], *stacked* [T, N, ...], or only of the *last*
step; views between merged and stacked are made where they are needed, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from snnpart import effects, facts, ops
from snnpart.facts import Origin, Value, Values
from snnpart.ops_time import batch_norm_repeated, batch_norm_steps
from snnpart.passes.analyze import kinds
from snnpart.passes.rewrite.fold_time.columns import MODEL, Column, Columns, Path, rebuild, slots

PASS = "fold-time"


@dataclass
class Folded:
    """A column's values in the new graph; `value` is that of one step."""

    value: Any
    once: fx.Node | None = None
    merged: fx.Node | None = None
    stacked: fx.Node | None = None
    last: fx.Node | None = None
    at: dict[int, fx.Node] = field(default_factory=dict)


def over_steps(value: Value, steps: int) -> Value:
    """The value of all steps, stacked."""
    return replace(value, shape=(steps, *value.shape), slopes=(0, *value.slopes), stride=())


def over_samples(value: Any, steps: int) -> Any:
    """The value of all steps, merged into dim 0; several results each."""
    if isinstance(value, Value):
        shape, slopes = (steps * value.shape[0], *value.shape[1:]), (steps * value.slopes[0], *value.slopes[1:])
        return replace(value, shape=shape, slopes=slopes, stride=())
    if isinstance(value, Values):
        return Values(over_samples(value.items, steps))
    return tuple(over_samples(item, steps) for item in value) if isinstance(value, tuple) else value


def carries_gradient(nodes: Iterable[fx.Node | None]) -> bool:
    """Whether any step's value does: some may be computed without one (`torch.no_grad`), others not."""
    values = (facts.get(node, Value) for node in nodes if node is not None)
    return any(value is not None and value.requires_grad for value in values)


def _is_moved(node: fx.Node) -> bool:
    """Whether a value made here lies in memory with time first, though its shape has time elsewhere."""
    seen, waiting = {node}, [node]
    while waiting:
        item = waiting.pop()
        if item.target is torch.movedim and facts.origin(item).made_by == PASS:
            return True
        if kinds.kind_of(item) == "elementwise":
            waiting += [source for source in item.all_input_nodes if source not in seen]
            seen.update(item.all_input_nodes)
    return False


class Unplaced(Exception):
    """`node` is read where the new graph has no value of it: only the first step inside a loop makes it."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"%{node.name}")
        self.node = node


class Emitter:
    """Builds the graph; parts are given to it in the order they run."""

    def __init__(self, source: fx.Graph, columns: Columns) -> None:
        self.columns, self.steps = columns, columns.steps
        self.graph = fx.Graph()
        self.plain: dict[fx.Node, fx.Node] = {}
        self.folded: dict[Column, Folded] = {}
        self.gathered: dict[tuple[Column, Path], Folded] = {}
        for node in source.nodes:
            if node.op == "placeholder":
                self.copy(node)

    # values of the old graph

    def copy(self, node: fx.Node) -> None:
        """A node outside the columns, as it is."""
        if node in self.plain:
            return
        if node.op == "output":
            self.plain[node] = self.graph.output(map_arg(node.args[0], self.value))
        else:
            read = self._in_memory if effects.is_random(node) else self.value
            args, kwargs = map_arg(node.args, read), map_arg(node.kwargs, read)
            self.plain[node] = self.graph.create_node(node.op, node.target, args, dict(kwargs), node.name)
        self.plain[node].meta = dict(node.meta)

    def value(self, node: fx.Node) -> fx.Node:
        """The value of an old node: in a column, that of its step."""
        if node in self.plain:
            return self.plain[node]
        if node not in self.columns.of:
            raise Unplaced(node)
        column, step = self.columns.of[node]
        return self.at(column, step)

    def _in_memory(self, node: fx.Node) -> fx.Node:
        """An operand of a draw, as it lay in memory: its numbers are drawn in that order."""
        made, value = self.value(node), facts.get(node, Value)
        if value is None or not _is_moved(made):
            return made
        return self.add("contiguous", (made,), value, node)

    def at(self, column: Column, step: int) -> fx.Node:
        """One step's value of a column."""
        folded = self.folded[column]
        if folded.once is not None:
            return folded.once
        if step == self.steps - 1 and folded.last is not None:
            return folded.last
        if step not in folded.at:
            args = (self.stacked(column), 0, step)
            folded.at[step] = self.add(torch.select, args, folded.value, column.model)
        return folded.at[step]

    def merged(self, column: Column) -> fx.Node:
        """All steps' values as [T*N, ...]."""
        return self.merge(self.folded[column], column.model)

    def stacked(self, column: Column) -> fx.Node:
        """All steps' values as [T, N, ...]."""
        return self.stack(self.folded[column], column.model)

    def merge(self, folded: Folded, like: fx.Node) -> fx.Node:
        if folded.merged is None:
            whole = self.stack(folded, like)
            folded.merged = self.add(torch.flatten, (whole, 0, 1), over_samples(folded.value, self.steps), like)
        return folded.merged

    def stack(self, folded: Folded, like: fx.Node) -> fx.Node:
        if folded.stacked is None and folded.once is not None:
            rank = len(folded.value.shape)
            one = self.add(torch.unsqueeze, (folded.once, 0), over_steps(folded.value, 1), like)
            size = (self.steps, *(-1,) * rank)
            folded.stacked = self.add("expand", (one, size), over_steps(folded.value, self.steps), like)
        elif folded.stacked is None:
            parts = (folded.merged, 0, (self.steps, -1))
            folded.stacked = self.add(torch.unflatten, parts, over_steps(folded.value, self.steps), like)
        return folded.stacked

    def add(self, target: Any, args: tuple[Any, ...], value: Any, like: fx.Node, name: str | None = None) -> fx.Node:
        """A new node that comes from where `like` does."""
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, {}, name)
        facts.put(node, *([value] if value is not None else []), origin(like))
        return node

    # operands of a column

    def operand(self, column: Column, path: Path, node: fx.Node) -> Folded | fx.Node:
        """An operand of the column's model: all steps' values, or one that all steps share."""
        if self.columns.steps_of.get(node) != MODEL:
            return self.value(node)
        if node in self.columns.of:
            folded = self.folded[self.columns.of[node][0]]
            return folded.once if folded.once is not None else folded
        key = (column, path)
        if key not in self.gathered:
            sources = [dict(slots(one or column.model))[path] for one in column.nodes]
            items = [self.value(source) for source in sources]
            value = replace(facts.need(node, Value), requires_grad=carries_gradient(sources))
            stacked = self.add(torch.stack, (items, 0), over_steps(value, self.steps), node)
            self.gathered[key] = Folded(value, stacked=stacked)
        return self.gathered[key]

    def _all_steps(self, column: Column, path: Path, node: fx.Node) -> Folded:
        found = self.operand(column, path, node)
        return Folded(facts.need(node, Value), once=found) if isinstance(found, fx.Node) else found

    def _to_repeat(self, column: Column) -> frozenset[Path]:
        """Operands that do not vary and are repeated over the steps: all that are joined with others that do, and the
        first of an operation that none of them varies for (a draw, which is another one at every step)."""
        operands = list(inputs_of(column.model))
        if kinds.kind_of(column.model) == "join":
            return frozenset(path for path, _ in operands)
        varies = any(isinstance(self.operand(column, path, node), Folded) for path, node in operands)
        return frozenset() if varies else frozenset(path for path, _ in operands[:1])

    def _brought(self, column: Column, path: Path, node: fx.Node, repeated: frozenset[Path]) -> Folded | fx.Node:
        return self._all_steps(column, path, node) if path in repeated else self.operand(column, path, node)

    # parts

    def once(self, column: Column) -> None:
        """What is the same at every step, computed once."""
        node = column.nodes[0]
        assert node is not None
        args, kwargs = rebuild(node, lambda path, v: self.value(v) if isinstance(v, fx.Node) else v)
        target = node.target
        if target is ops.batch_norm and isinstance(node.args[3], fx.Node):
            target, args = batch_norm_repeated, (*args, self.steps)
        made = self.graph.create_node(node.op, target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        facts.put(made, origin(node))
        self.folded[column] = Folded(_value_of(node), once=made)

    def call_merged(self, column: Column) -> None:
        """One call on T times the samples."""
        model = column.model

        repeated = self._to_repeat(column)

        def change(path: Path, value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            found = self._brought(column, path, value, repeated)
            return self.merge(found, model) if isinstance(found, Folded) else found

        args, kwargs = rebuild(model, change)
        value = _value_of(model)
        target, args = _with_more_samples(model, args, value, self.steps)
        made = self.graph.create_node(model.op, target, args, kwargs, self.name(column))
        facts.put(made, over_samples(value, self.steps), origin(model))
        self.folded[column] = Folded(value, merged=made)

    def call_stacked(self, column: Column) -> None:
        """One element-wise call with the steps in front; operands with fewer dims get ones behind the steps."""
        model, value = column.model, facts.need(column.model, Value)

        repeated = self._to_repeat(column)

        def change(path: Path, item: Any) -> Any:
            if not isinstance(item, fx.Node):
                return item
            found = self._brought(column, path, item, repeated)
            return self._aligned(found, len(value.shape), model) if isinstance(found, Folded) else found

        args, kwargs = rebuild(model, change)
        made = self.graph.create_node(model.op, model.target, args, kwargs, self.name(column))
        facts.put(made, over_steps(value, self.steps), origin(model))
        self.folded[column] = Folded(value, stacked=made)

    def _aligned(self, folded: Folded, rank: int, like: fx.Node) -> fx.Node:
        node, shape, slopes = self.stack(folded, like), folded.value.shape, folded.value.slopes
        for _ in range(rank - len(shape)):
            shape, slopes = (1, *shape), (0, *slopes)
            value = replace(folded.value, shape=shape, slopes=slopes)
            node = self.add(torch.unsqueeze, (node, 1), over_steps(value, self.steps), like)
        return node

    def layer(self, column: Column) -> None:
        """A neuron layer that takes all steps in one call."""
        model, value = column.model, facts.need(column.model, Value)
        found = self._all_steps(column, (0, 0), model.args[0])  # type: ignore[arg-type]
        made = self.graph.create_node("call_module", model.target, (self.stack(found, model),), {}, self.name(column))
        facts.put(made, over_steps(value, self.steps), origin(model))
        self.folded[column] = Folded(value, stacked=made)

    def total(self, column: Column, term_of: Callable[[Column], tuple[Path, fx.Node, Any]]) -> None:
        """The last value of acc = acc + y."""
        path, term, start = term_of(column)
        value, model = facts.need(column.model, Value), column.model
        found = self._all_steps(column, path, term)
        made = self.add(torch.sum, (self.stack(found, model), 0, False), value, model, self.name(column))
        if isinstance(start, fx.Node):
            made = self.add(torch.add, (made, self.value(start)), value, model)
        elif start:
            made = self.add(torch.add, (made, start), value, model)
        self.folded[column] = Folded(value, last=made)

    def name(self, column: Column) -> str:
        """The name of the first step's node."""
        return (column.nodes[0] or column.model).name


def _value_of(node: fx.Node) -> Any:
    value = facts.get(node, Value)
    return value if value is not None else facts.get(node, Values)


def origin(node: fx.Node) -> Origin:
    """Where the node comes from, made by this pass."""
    return replace(facts.origin(node), made_by=PASS)


def _with_more_samples(model: fx.Node, args: tuple[Any, ...], value: Any, steps: int) -> tuple[Any, tuple[Any, ...]]:
    """Target and arguments for T times the samples, where a size of dim 0 or the number of steps is among them."""
    name = kinds.name_of(model)
    if name == "reshape" or name == "expand":
        return model.target, (args[0], (-1, *value.shape[1:]))
    if model.target is ops.batch_norm:
        return batch_norm_steps, (*args, steps)
    return model.target, args


def inputs_of(node: fx.Node) -> Iterator[tuple[Path, fx.Node]]:
    """The node's operands with their paths."""
    return ((path, value) for path, value in slots(node) if isinstance(value, fx.Node))
