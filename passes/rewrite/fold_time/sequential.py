"""Parts that run step by step, as one `Loop` node: graphs of an ordinary step and, where it differs, of the first.

What a part reads comes in three kinds: sequences (values of columns outside, one a step), fixed values, and values
carried from the step before. A carried value is known by its source and its first value: two readers of one membrane
may begin differently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from snnpart import facts
from snnpart.facts import Value, Values
from snnpart.ops_time import Keep, Loop
from snnpart.passes.rewrite.fold_time.columns import MODEL, Column, Path, rebuild, slots
from snnpart.passes.rewrite.fold_time.emit import Emitter, Folded, inputs_of, over_steps
from snnpart.passes.rewrite.fold_time.parts import Part


def emit_loop(emitter: Emitter, part: Part) -> None:
    """Add the part's loop, and its results as the columns' values."""
    _Build(emitter, part).emit()


class _Build:
    def __init__(self, emitter: Emitter, part: Part) -> None:
        self.emitter, self.columns = emitter, emitter.columns
        self.part, self.own = part, set(part.columns)
        self.extra = set(part.nodes)
        self.sequences: dict[Any, Folded] = {}
        self.fixed: dict[fx.Node, fx.Node] = {}
        self.carried: dict[Any, Any] = {}
        self.keep = {column: keep for column in part.columns if (keep := self._kept(column)) is not None}

    def emit(self) -> None:
        self._collect()
        has_first = self._has_first()
        body = self._graph(self._body)
        first = self._graph(self._first) if has_first else None
        loop = Loop(body, self.columns.steps, tuple(self.keep.values()), first)
        self._call(loop, has_first)

    def _call(self, loop: Loop, has_first: bool) -> None:
        emitter, like = self.emitter, self.part.columns[0].model
        sequences = tuple(emitter.stack(folded, like) for folded in self.sequences.values())
        begin = tuple(None if has_first else self._begin(init) for init in self.carried.values())
        values = Values(tuple(self._result(column, keep) for column, keep in self.keep.items()))
        node = emitter.add(loop, (sequences, self._fixed(), begin), values, like, "loop")
        for at, (column, keep) in enumerate(self.keep.items()):
            made = emitter.add(operator.getitem, (node, at), values.items[at], column.model, emitter.name(column))
            value = facts.need(column.model, Value)
            emitter.folded[column] = Folded(value, stacked=made) if keep == "all" else Folded(value, last=made)

    def _begin(self, init: Any) -> Any:
        return self.emitter.value(init) if isinstance(init, fx.Node) else init

    def _result(self, column: Column, keep: Keep) -> Value:
        value = facts.need(column.model, Value)
        return over_steps(value, self.columns.steps) if keep == "all" else value

    # what is read and what is kept

    def _kept(self, column: Column) -> Keep | None:
        """Of which steps others read the column's value."""
        found: Keep | None = None
        for step, node in enumerate(column.nodes):
            for user in node.users if node is not None else ():
                reader = self.columns.of[user][0] if user in self.columns.of else user
                if reader in self.own or reader in self.extra:
                    continue
                if isinstance(reader, Column) or step != self.columns.steps - 1:
                    return "all"
                found = "last"
        if column.first is not None and any(self._is_outside(user) for user in column.first.users):
            return "all"
        return found

    def _is_outside(self, user: fx.Node) -> bool:
        reader = self.columns.of[user][0] if user in self.columns.of else user
        return reader not in self.own and reader not in self.extra

    def _collect(self) -> None:
        """Name everything that the part reads."""
        for column in self.part.columns:
            for path, value in inputs_of(column.model):
                key = self._carry(column, path, value)
                if key is not None:
                    self.carried.setdefault(key, _first_operand(column, path))
                else:
                    self._read(column, path, value)
        for source, _ in list(self.carried):
            if isinstance(source, Column) and source not in self.own:
                self._sequence(source, self.emitter.folded[source])
        for node in self._first_nodes() if self._has_first() else ():
            for _, value in inputs_of(node):
                self._read_at_first(value)
        for value in self._first_results() if self._has_first() else ():
            self._read_at_first(value)

    def _carry(self, column: Column, path: Path, value: fx.Node) -> Any:
        """The key of a carried operand, among them what step 0 of the part makes for all steps; None for another."""
        source = column.carried.get(path)
        if source is not None:
            return source, _begins(column, path)
        if value in self.extra or (self._step(value) == 0 and not self._is_outside(value)):
            return value, "fixed"
        return None

    def _read(self, column: Column, path: Path, value: fx.Node) -> None:
        if value in self.columns.of and self.columns.of[value][0] in self.own and self._step(value) == MODEL:
            return
        found = self.emitter.operand(column, path, value)
        if isinstance(found, fx.Node):
            self.fixed[value] = found
        else:
            self._sequence(self.columns.of[value][0] if value in self.columns.of else (column, path), found)

    def _sequence(self, key: Any, folded: Folded) -> None:
        if folded.once is None:
            self.sequences.setdefault(key, folded)

    def _read_at_first(self, node: fx.Node) -> None:
        if node in self.extra or (node in self.columns.of and self.columns.of[node][0] in self.own):
            return
        if node in self.columns.of and self.emitter.folded[self.columns.of[node][0]].once is None:
            column = self.columns.of[node][0]
            self._sequence(column, self.emitter.folded[column])
        else:
            self.fixed[node] = self.emitter.value(node)

    def _fixed(self) -> tuple[fx.Node, ...]:
        """The fixed values; one may stand for several old nodes."""
        return tuple(dict.fromkeys(self.fixed.values()))

    def _step(self, node: fx.Node) -> int | None:
        return self.columns.steps_of.get(node)

    # the first step

    def _has_first(self) -> bool:
        """Whether step 0 needs a graph of its own."""
        inits = [init for init in self.carried.values() if isinstance(init, fx.Node)]
        return (
            bool(self.extra)
            or any(column.nodes[0] is None for column in self.own)
            or any(isinstance(source, fx.Node) for source, _ in self.carried)
            or any(init in self.columns.of for init in inits)
        )

    def _first_nodes(self) -> list[fx.Node]:
        nodes = [column.nodes[0] for column in self.own if column.nodes[0] is not None]
        order = {node: i for i, node in enumerate(self.part.columns[0].model.graph.nodes)}
        return sorted([*nodes, *self.extra], key=order.__getitem__)

    def _first_results(self) -> Iterator[fx.Node]:
        """What step 0 makes: carried values, then results."""
        for source, _ in self.carried:
            value = source.at(0) if isinstance(source, Column) else source
            assert value is not None
            yield value
        for column in self.keep:
            value = column.at(0)
            assert value is not None
            yield value

    # graphs

    def _graph(self, fill: Callable[[fx.Graph, dict[Any, fx.Node]], list[fx.Node]]) -> fx.Graph:
        graph = fx.Graph()
        inputs: dict[Any, fx.Node] = {}
        for at, (key, folded) in enumerate(self.sequences.items()):
            inputs["sequence", key] = _input(graph, f"step{at}", folded.value)
        shared = {new: _input(graph, f"fixed{at}", facts.get(new, Value)) for at, new in enumerate(self._fixed())}
        inputs.update((("fixed", old), shared[new]) for old, new in self.fixed.items())
        for at, key in enumerate(self.carried):
            inputs["carried", key] = _input(graph, f"carried{at}", self._carried_value(key[0]))
        graph.output(tuple(fill(graph, inputs)))
        return graph

    def _carried_value(self, source: Column | fx.Node) -> Value | Values | None:
        node = source.model if isinstance(source, Column) else source
        return facts.get(node, Value) or facts.get(node, Values)

    def _body(self, graph: fx.Graph, inputs: dict[Any, fx.Node]) -> list[fx.Node]:
        made: dict[Column, fx.Node] = {}
        for column in self.part.columns:
            made[column] = self._copy_model(column, graph, inputs, made)

        def carried(key: Any) -> fx.Node:
            source = key[0]
            if isinstance(source, Column):
                return made[source] if source in self.own else inputs["sequence", source]
            return inputs["carried", key]

        return [*(carried(key) for key in self.carried), *(made[column] for column in self.keep)]

    def _copy_model(
        self, column: Column, graph: fx.Graph, inputs: dict[Any, fx.Node], made: dict[Column, fx.Node]
    ) -> fx.Node:
        def change(path: Path, value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            key = self._carry(column, path, value)
            if key is not None:
                return inputs["carried", key]
            if value in self.columns.of and self._step(value) == MODEL and self.columns.of[value][0] in made:
                return made[self.columns.of[value][0]]
            if value in self.fixed:
                return inputs["fixed", value]
            return inputs["sequence", self.columns.of[value][0] if value in self.columns.of else (column, path)]

        return _copy(column.model, graph, change)

    def _first(self, graph: fx.Graph, inputs: dict[Any, fx.Node]) -> list[fx.Node]:
        made: dict[fx.Node, fx.Node] = {}

        def value(node: fx.Node) -> fx.Node:
            if node in made:
                return made[node]
            if node in self.fixed:
                return inputs["fixed", node]
            return inputs["sequence", self.columns.of[node][0]]

        for node in self._first_nodes():
            made[node] = _copy(node, graph, lambda path, v: value(v) if isinstance(v, fx.Node) else v)
        return [value(node) for node in self._first_results()]


def _input(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    if value is not None:
        facts.put(node, value)
    return node


def _copy(node: fx.Node, graph: fx.Graph, change: Callable[[Path, Any], Any]) -> fx.Node:
    args, kwargs = rebuild(node, change)
    new = graph.create_node(node.op, node.target, args, kwargs, node.name)
    new.meta = dict(node.meta)
    return new


def _first_operand(column: Column, path: Path) -> Any:
    """The operand at step 0: any value, or None where there is no node."""
    node = column.nodes[0]
    return dict(slots(node))[path] if node is not None else None


def _begins(column: Column, path: Path) -> Any:
    """What tells first values apart."""
    value = _first_operand(column, path)
    return value if isinstance(value, fx.Node) else repr(value)
