"""Columns: the same operation at successive steps, with operands that lie alike.

Step 1 is the model: it has a copy before and one after it, so that it reads carried values and makes all that are read
later. A node of another step belongs to the column of a node of step 1 when both do the same (operation, module, line)
and each operand

    is the same literal, or an index that counts with the step;
    comes from the same column at the same step, or at the step before (*carried*);
    is the same value from outside the loop.

Step 0 may differ: a carried operand is then any first value, and a column may have no node of its own at step 0 but
another value in its place (`first`), as a membrane that begins as the first input. The last steps may lack what nobody
reads.
A column that fits at fewer steps is dissolved: its nodes stay as they are, and `reasons` says why.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from snnpart import effects, facts
from snnpart.facts import Value
from snnpart.passes.rewrite.fold_time.steps import Steps, key_of

MODEL = 1
"""The step that the others are compared with."""

Path = tuple[Any, ...]
_ROUNDS = 256


@dataclass(eq=False)
class Column:
    """The nodes of one operation by step (None: there is none), and what stands in its place at step 0.

    `carried` says of an operand (by its path in the arguments) which column's last value it is, or which value of step
    0 all later steps read; `first` gives the value in place of a missing node at step 0; `indices` the values of an
    index that counts, by its path.
    """

    place: int
    nodes: list[fx.Node | None]
    carried: dict[Path, Column | fx.Node] = field(default_factory=dict)
    first: fx.Node | None = None
    indices: dict[Path, list[int]] = field(default_factory=dict)

    @property
    def model(self) -> fx.Node:
        """The node of step 1, which stands for all."""
        found = self.nodes[MODEL]
        assert found is not None
        return found

    def at(self, step: int) -> fx.Node | None:
        """The value at a step."""
        own = self.nodes[step]
        return self.first if own is None and step == 0 else own


@dataclass
class Columns:
    """All columns, the column and step of each node in one, and why others were given up."""

    steps: int
    columns: list[Column]
    of: dict[fx.Node, tuple[Column, int]]
    reasons: dict[fx.Node, str]
    steps_of: Mapping[fx.Node, int]


def slots(node: fx.Node) -> Iterator[tuple[Path, Any]]:
    """Every argument that is a node or a literal, with its path; containers are opened."""
    yield from _slots((), (node.args, dict(node.kwargs)))


def _slots(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _slots((*path, i), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _slots((*path, key), item)
    elif isinstance(value, slice):
        for end in ("start", "stop", "step"):
            yield from _slots((*path, end), getattr(value, end))
    else:
        yield path, value


def rebuild(node: fx.Node, change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with every node or literal replaced by `change(path, value)`."""
    args, kwargs = _rebuild((), (tuple(node.args), dict(node.kwargs)), change)
    return args, kwargs


def _rebuild(path: Path, value: Any, change: Any) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_rebuild((*path, i), item, change) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: _rebuild((*path, key), item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_rebuild((*path, end), getattr(value, end), change) for end in ("start", "stop", "step")))
    return change(path, value)


def match(steps: Steps, given_up: Mapping[fx.Node, str]) -> Columns:
    """Sort the nodes of all steps into columns, without those whose node at step 1 is given up."""
    dissolved = dict(given_up)
    known: dict[fx.Node, dict[Path, Any]] = {}
    for _ in range(_ROUNDS):
        found = _Match(steps, dissolved, known)
        new = found.run()
        if not new:
            return Columns(steps.count, found.columns, found.of, dissolved, steps.of)
        dissolved |= new
    return Columns(steps.count, [], {}, dissolved, steps.of)


class _Match:
    """One round: columns for the nodes of step 1 that are not dissolved."""

    def __init__(self, steps: Steps, dissolved: Mapping[fx.Node, str], known: dict[fx.Node, dict[Path, Any]]) -> None:
        self.steps, self.by_step, self.known = steps, steps.nodes(), known
        self.columns: list[Column] = []
        self.of: dict[fx.Node, tuple[Column, int]] = {}
        self.unmatched: dict[int, set[Hashable]] = {}
        self.waiting: defaultdict[Any, list[Column]] = defaultdict(list)
        for node in self.by_step[MODEL]:
            if node not in dissolved:
                column = Column(len(self.columns), [None] * steps.count)
                self._enter(node, column, MODEL)
                self.columns.append(column)
                self.waiting[key_of(node)].append(column)

    def read(self, node: fx.Node) -> dict[Path, Any]:
        """The node's arguments by path."""
        if node not in self.known:
            self.known[node] = dict(slots(node))
        return self.known[node]

    def run(self) -> dict[fx.Node, str]:
        """Fill the columns; returns those to dissolve (by their model) with the reason.

        What fails together with an operand is given another round: it may take what its operand becomes.
        """
        for step in (t for t in range(self.steps.count) if t != MODEL):
            self._sort_all_in(step)
        self._name_carried()
        failed: dict[fx.Node, str] = {}
        follows: set[fx.Node] = set()
        for column in self.columns:
            why = self._carries_badly(column) or self._incomplete(column)
            if why and not failed.keys().isdisjoint(column.model.all_input_nodes):
                follows.add(column.model)
            if why:
                failed[column.model] = why
        return {node: why for node, why in failed.items() if node not in follows}

    def _enter(self, node: fx.Node, column: Column, step: int) -> None:
        column.nodes[step] = node
        self.of[node] = (column, step)

    def _sort_all_in(self, step: int) -> None:
        """Enter the nodes of a step: those that fit as they are, then, one by one, those that need other values in the
        place of nodes: first such as are copies themselves (an input for a membrane), then what is made of those."""
        waiting = self.by_step[step]
        allowed = 0
        while allowed < 3:
            left = []
            for i, node in enumerate(waiting):
                found = self._sort_in(node, step, allowed)
                if not found:
                    left.append(node)
                elif allowed:
                    left += waiting[i + 1 :]
                    break
            progress = len(left) < len(waiting)
            waiting = left
            allowed = 0 if allowed and progress else allowed + 1
            if step:
                return

    def _oddness(self, value: fx.Node) -> int:
        """1 for a copy, 2 for what step 0 makes of copies, 3 for values from outside the loop."""
        if value in self.of:
            return 1
        made = self.steps.of.get(value) == 0 and any(self._oddness(source) < 3 for source in value.all_input_nodes)
        return 2 if made else 3

    def _sort_in(self, node: fx.Node, step: int, allowed: int) -> bool:
        """Enter the node into the first column that it fits."""
        for column in self.waiting.get(key_of(node), ()):
            if column.at(step) is not None:
                continue
            needs = self._fits(column, node, step)
            if needs is not None and allowed >= max((self._oddness(value) for value in needs.values()), default=0):
                self._enter(node, column, step)
                for source, value in needs.items():
                    source.first = value
                return True
        return False

    def _fits(self, column: Column, node: fx.Node, step: int) -> dict[Column, fx.Node] | None:
        """None: it does not fit. Else the columns that need this value in the place of a node at step 0."""
        ours, theirs = self.read(column.model).items(), self.read(node).items()
        if len(ours) != len(theirs):
            return None
        needs: dict[Column, fx.Node] = {}
        for (path, a), (other, b) in zip(ours, theirs, strict=True):
            if path != other or not self._alike(column, path, a, b, step, needs):
                return None
        return needs

    def _alike(self, column: Column, path: Path, a: Any, b: Any, step: int, needs: dict[Column, fx.Node]) -> bool:
        if not isinstance(a, fx.Node):
            return not isinstance(b, fx.Node) and (_same(a, b) or self._counts(column.model, path, a, b))
        source, at = self.of.get(a, (None, -1))
        if source is not None and at == MODEL:
            return isinstance(b, fx.Node) and self._same_step(source, b, step, needs)
        if self.steps.of.get(a) == MODEL - 1 and b is not a:
            return step == 0 or (isinstance(b, fx.Node) and self.steps.of.get(b) == step - 1)
        if self.steps.of.get(a) == MODEL:  # the steps' values are stacked, which numbers made of the batch size are not
            tensors = isinstance(b, fx.Node) and facts.get(a, Value) is not None and facts.get(b, Value) is not None
            return tensors and self.steps.of.get(b) == step and b not in self.of
        return a is b or (step == 0 and self.steps.of.get(a) == 0)

    def _same_step(self, source: Column, b: fx.Node, step: int, needs: dict[Column, fx.Node]) -> bool:
        own = source.nodes[step]
        if own is not None:
            return own is b
        if step != 0 or (source.first or needs.get(source) or b) is not b:
            return False
        needs[source] = b
        return self.steps.of.get(b, 0) == 0

    def _name_carried(self) -> None:
        """Which column a carried operand comes from: the one it has at step 2; with two steps, the value at step 0."""
        for column in self.columns:
            for path, a in self.read(column.model).items():
                if isinstance(a, fx.Node) and self.steps.of.get(a) == MODEL - 1:
                    source = self._source(column, path, a)
                    if source is not None:
                        column.carried[path] = source

    def _source(self, column: Column, path: Path, a: fx.Node) -> Column | fx.Node | None:
        """The column whose last value it is, or the value of step 0 that later steps read; None for a fixed operand."""
        later = column.nodes[MODEL + 1] if self.steps.count > MODEL + 1 else None
        b = self.read(later)[path] if later is not None else None
        if b is not None and b is not a:
            return self.of[b][0] if b in self.of else a
        begin = column.nodes[0]
        if begin is None or self.read(begin)[path] is a:
            return None
        return self.of[a][0] if a in self.of and b is None else a

    def _carries_badly(self, column: Column) -> str:
        """Why the carried operands are not one column's values, each from the step before; empty when they are."""
        for step, node in enumerate(column.nodes):
            values = self.read(node) if node is not None else {}
            for path, a in self.read(column.model).items() if node is not None else ():
                if not isinstance(a, fx.Node):
                    continue
                if step and self.steps.of.get(a) == MODEL - 1:
                    if not self._comes_from(column.carried.get(path, a), values[path], step):
                        return f"its operand %{values[path]} is not what the step before made"
                elif a in self.of and self.of[a][1] == MODEL and self.of[a][0].at(step) is not values[path]:
                    return f"its operand %{values[path]} is another than at other steps"
        return ""

    def _comes_from(self, source: Column | fx.Node, value: Any, step: int) -> bool:
        if isinstance(source, fx.Node):
            return value is source
        if step == MODEL and source.at(0) is None:
            source.first = value
        return source.at(step - 1) is value

    def _incomplete(self, column: Column) -> str:
        last = self.steps.count - 1
        missing = [t for t, node in enumerate(column.nodes) if node is None]
        middle = [t for t in missing if 0 < t < last and (t < self._ran(column) or self._otherwise(column, t))]
        if column.at(0) is None:
            return "it has no value at step 0"
        if last in missing and any(
            self.steps.of.get(n) == MODEL and n not in self.of for n in column.model.all_input_nodes
        ):
            return "an operand is not the same operation at every step"
        if middle or (missing and _must_run(column.model)):
            return f"it does not run alike at step {(middle or missing)[0]}"
        for path, a in self.read(column.model).items():
            if not isinstance(a, fx.Node):
                column.indices |= {path: values} if (values := self._index(column, path)) else {}
        return ""

    def _ran(self, column: Column) -> int:
        """The last step at which there is a node."""
        return max(t for t, node in enumerate(column.nodes) if node is not None)

    def _otherwise(self, column: Column, step: int) -> bool:
        """Whether the step has the operation, but with other operands; a neuron layer runs at every step anyway."""
        if step not in self.unmatched:
            self.unmatched[step] = {key_of(node) for node in self.by_step[step] if node not in self.of}
        return column.model.op == "call_module" or key_of(column.model) in self.unmatched[step]

    def _index(self, column: Column, path: Path) -> list[int] | None:
        """The values of an index at every step; None when they are all the same."""
        values = [self.read(node)[path] for node in column.nodes if node is not None]
        return values if len(set(map(repr, values))) > 1 else None

    def _counts(self, model: fx.Node, path: Path, a: Any, b: Any) -> bool:
        """Whether a and b are an index, into a value from outside the loop, that may count with the step."""
        if type(a) is not int or type(b) is not int or self.steps.of.get(model.args[0]) is not None:  # type: ignore[arg-type]
            return False
        if model.target is operator.getitem:
            return path == (0, 1) or (len(path) == 3 and path[:2] == (0, 1))
        return model.target is torch.select and path == (0, 2)


def _must_run(node: fx.Node) -> bool:
    """Whether a copy of the node at a step where the user has none would change something."""
    return effects.writes_buffer(node) or effects.is_random(node)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b or a != a)
