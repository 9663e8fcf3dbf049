"""What of the loop's body runs how.

The columns, and the nodes outside them, depend on each other at the same step and from one step to the next. The
strongly connected components of that graph, in topological order, are the parts:

    plain    nodes outside the columns: before the loop, after it, or given up
    once     a column that is the same at every step: computed once
    merged   one call on [T*N, ...]        (see `forms`)
    stacked  one call on [T, N, ...]
    slices   `x[t]`: a view of all steps
    total    acc = acc + y, of which only the last value is read: a sum over steps
    layer    a neuron layer that takes all steps in one call
    loop     everything else: run step by step inside one node

A component that holds nodes outside the columns (other than those of step 0) cannot be run so: its columns are given
up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import networkx as nx
from torch import fx

from snnpart import effects, facts, ops
from snnpart.facts import Value
from snnpart.graph import SpikeGraph
from snnpart.passes.rewrite.fold_time import forms
from snnpart.passes.rewrite.fold_time.columns import MODEL, Column, Columns, slots
from snnpart.passes.rewrite.fold_time.totals import is_running_sum

Kind = Literal["plain", "once", "merged", "stacked", "slices", "total", "layer", "loop"]
Unit = Column | fx.Node


@dataclass(frozen=True, eq=False)
class Part:
    """Columns that run together; `nodes` are those outside columns (of step 0, in a loop)."""

    kind: Kind
    columns: tuple[Column, ...]
    nodes: tuple[fx.Node, ...] = ()
    why: str = ""


def find(graph: SpikeGraph, columns: Columns, takes_all_steps: Callable[[fx.Node], bool]) -> list[Part]:
    """The parts in the order they must run."""
    return _Parts(graph, columns, takes_all_steps).run()


class Entangled(Exception):
    """A component holds nodes that are no copies; `nodes` are its columns' models."""

    def __init__(self, nodes: list[fx.Node], why: str) -> None:
        super().__init__(why)
        self.nodes, self.why = nodes, why


class _Parts:
    def __init__(self, graph: SpikeGraph, columns: Columns, takes_all_steps: Callable[[fx.Node], bool]) -> None:
        self.graph, self.columns, self.takes_all_steps = graph, columns, takes_all_steps
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.invariant: set[Column] = set()
        self.with_readers: dict[Column, str] = {}

    def run(self) -> list[Part]:
        """A loop's results are tensors of all steps: what reads another value of a step has to run in the loop too."""
        while True:
            parts = self._arranged()
            found = {column: part.why for part in parts if part.kind == "loop" for column in part.columns}
            found = {
                c: why for c, why in found.items() if c not in self.with_readers and facts.get(c.model, Value) is None
            }
            if not found:
                return parts
            self.with_readers |= found

    def _arranged(self) -> list[Part]:
        dependencies = self._dependencies()
        condensed = nx.condensation(dependencies)
        members = {part: data["members"] for part, data in condensed.nodes(data=True)}
        order = nx.lexicographical_topological_sort(
            condensed, key=lambda part: min(self._position(unit) for unit in members[part])
        )
        return [self._part(members[part], dependencies) for part in order]

    def _position(self, unit: Unit) -> int:
        return self.order[unit if isinstance(unit, fx.Node) else unit.model]

    def owner(self, node: fx.Node) -> Unit:
        """The column of a node, or the node itself outside all columns."""
        return self.columns.of[node][0] if node in self.columns.of else node

    def _dependencies(self) -> nx.DiGraph:
        found: nx.DiGraph = nx.DiGraph()
        found.add_nodes_from(self.columns.columns)
        for node in self.graph.graph.nodes:
            if node not in self.columns.of:
                found.add_node(node)
                found.add_edges_from((self.owner(source), node) for source in node.all_input_nodes)
        for column in self.columns.columns:
            found.add_edges_from((source, column) for source in self._sources(column))
        found.add_edges_from(self._successive())
        self._tie(found)
        return found

    def _sources(self, column: Column) -> Iterator[Unit]:
        yield from (s if isinstance(s, Column) else self.owner(s) for s in column.carried.values())
        if column.first is not None:
            yield self.owner(column.first)
        for step, node in enumerate(column.nodes):
            for path, value in slots(node) if node is not None else ():
                if isinstance(value, fx.Node) and (step == 0 or path not in column.carried):
                    yield self.owner(value)

    def _successive(self) -> Iterator[tuple[Unit, Unit]]:
        """Calls of one state stay in the order they have: each moves what the next one finds."""
        last: dict[object, Unit] = {}
        for node in self.graph.graph.nodes:
            state, unit = _state_of(node), self.owner(node)
            if state is not None and last.get(state, unit) is not unit:
                yield last[state], unit
            last[state] = unit

    def _tie(self, found: nx.DiGraph) -> None:
        """Calls that hand on hidden state, and results with what is taken out of them, run together."""
        tied: defaultdict[object, list[Column]] = defaultdict(list)
        for column in self.columns.columns:
            model = column.model
            if (state := _state_of(model)) is not None:
                tied[state].append(column)
            makes_tuple = model.op == "call_module" or isinstance(model.target, type)
            if column in self.with_readers or (makes_tuple and facts.get(model, Value) is None):
                found.add_edges_from((user, column) for user in list(found.successors(column)))
        for members in tied.values():
            if members[0].model.op == "call_module" and not self.takes_all_steps(members[0].model):
                found.add_edge(members[0], members[0])
            for one, other in zip(members, members[1:], strict=False):
                found.add_edges_from([(one, other), (other, one)])

    def _part(self, members: set[Unit], dependencies: nx.DiGraph) -> Part:
        columns = tuple(sorted((u for u in members if isinstance(u, Column)), key=self._position))
        nodes = tuple(sorted((u for u in members if isinstance(u, fx.Node)), key=self._position))
        if not columns:
            return Part("plain", (), nodes)
        late = [node for node in nodes if not self._is_first_step(node)]
        if late:
            raise Entangled(
                [c.model for c in columns], f"it depends on %{late[0].name}, which does not run at every step"
            )
        if len(members) > 1 or dependencies.has_edge(columns[0], columns[0]):
            is_total = len(members) == 1 and is_running_sum(columns[0], self.columns)
            why = next(filter(None, (self.with_readers.get(column) for column in columns)), "")
            return Part("total" if is_total else "loop", columns, nodes, why)
        return self._single(columns[0])

    def _is_first_step(self, node: fx.Node) -> bool:
        return self.step_of(node) == 0

    def step_of(self, node: fx.Node) -> int | None:
        return self.columns.steps_of.get(node)

    def _single(self, column: Column) -> Part:
        """A column that depends on itself in no way."""
        model = column.model
        if column.indices:
            return Part("slices", (column,))
        if column.first is not None or column.nodes[0] is None or column.carried:
            return Part("loop", (column,), why="step 0 differs")
        if len({_shapes(node) for node in column.nodes if node is not None}) > 1:
            raise Entangled([model], "its steps differ in shape")
        if model.op == "call_module":
            return Part("layer", (column,))
        if self._is_invariant(column):
            self.invariant.add(column)
            return Part("once", (column,))
        form = forms.form_of(model, self._varies)
        if isinstance(form, forms.Declined):
            return Part("loop", (column,), why=form.why)
        return Part(form, (column,))

    def _varies(self, node: fx.Node) -> bool:
        """Whether an operand of a model node differs from step to step."""
        if self.step_of(node) != MODEL:
            return False
        return node not in self.columns.of or self.columns.of[node][0] not in self.invariant

    def _is_invariant(self, column: Column) -> bool:
        model = column.model
        return not effects.is_random(model) and not any(self._varies(source) for source in model.all_input_nodes)


def _state_of(node: fx.Node) -> object:
    """What a call hands on to the next one beside its results: a leaf's state, a norm's averages."""
    if node.op == "call_module":
        return "leaf", node.target
    if node.target is ops.batch_norm and isinstance(node.args[3], fx.Node):
        return "norm", node.args[3].target
    return None


def _shapes(node: fx.Node) -> tuple[object, ...]:
    """Shapes and types of the node and its operands: a call on all steps needs the same at every step."""
    values = (facts.get(one, Value) for one in (node, *(v for _, v in slots(node) if isinstance(v, fx.Node))))
    return tuple((value.shape, value.dtype) if value is not None else None for value in values)
