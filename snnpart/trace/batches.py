"""Two recordings with two batch sizes become one graph that holds for every batch size.

Both graphs are walked side by side. Where a number differs it becomes `affine(batch_size, slope, offset)`,
where a dim differs it gets a slope. Two points always lie on a line: when some size has an offset (N*N has one, N and
T*N have none), a third recording must lie on it too. Where the graphs differ in anything else the batch size is part of
what the code does, and the graph holds for the example batch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from snnpart import facts, ops
from snnpart.facts import Value, Values
from snnpart.graph import BATCH_SIZE, BatchGuard, output_node
from snnpart.trace import places, sizes
from snnpart.trace.session import Recording


class BatchMatters(Exception):
    """The two recordings do not describe one graph; the message says where they part."""


@dataclass(frozen=True)
class Line:
    """size(n) = slope * n + offset. Floats where the code made one of a size (`n = x.numel() / x.shape[1]`)."""

    slope: int | float
    offset: int | float

    def at(self, n: int) -> int | float:
        return self.slope * n + self.offset


class Pair:
    """Two recordings, side by side."""

    def __init__(self, first: Recording, second: Recording) -> None:
        assert first.batch is not None and second.batch is not None
        self.first, self.second = first, second
        self.n, self.m = first.batch, second.batch
        self.offsets = False

    def line(self, a: int, b: int, place: fx.Node | str) -> Line:
        """The line through the two sizes of a node, or compared at a line of the user's."""
        slope, rest = divmod(b - a, self.m - self.n)
        if rest:
            place = place if isinstance(place, str) else _place(place)
            raise BatchMatters(f"{place}: a size is {a} at batch {self.n} and {b} at batch {self.m}, not a line")
        found = Line(slope, a - slope * self.n)
        self.offsets = self.offsets or (slope != 0 and found.offset != 0)
        return found

    def float_line(self, a: float, b: float, node: fx.Node) -> Line:
        """The line through two floats; a third recording must lie on it, as any two points do."""
        slope = (b - a) / (self.m - self.n)
        found = Line(slope, a - slope * self.n)
        if found.at(self.n) != a or found.at(self.m) != b:
            raise BatchMatters(f"{_place(node)}: an argument is {a!r} at batch {self.n} and {b!r} at batch {self.m}")
        self.offsets = True
        return found

    def nodes(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Nodes at the same place; BatchMatters when one graph has others than the other."""
        firsts, seconds = list(self.first.graph.nodes), list(self.second.graph.nodes)
        for a, b in zip(firsts, seconds):
            if a.op != b.op or a.target != b.target:
                raise BatchMatters(f"{_place(a)}: other operations are run at batch {self.m} than at batch {self.n}")
            yield a, b
        if len(firsts) != len(seconds):
            raise BatchMatters(f"{len(firsts)} operations are run at batch {self.n}, {len(seconds)} at batch {self.m}")


def merge(first: Recording, second: Recording) -> tuple[bool, tuple[BatchGuard, ...]]:
    """Write slopes and affine sizes into the first recording's graph.

    Returns whether some size has an offset, so that a third recording should be checked against the lines, and what the
    code asked about the batch size.

    Raises:
        BatchMatters: the batch size is part of what the code does. The graph is then unchanged.
    """
    pair = Pair(first, second)
    if first.output_names != second.output_names or first.out_constants != second.out_constants:
        raise BatchMatters(f"the output's structure or constants differ between batch {pair.n} and {pair.m}")
    same: dict[fx.Node, fx.Node] = {}
    changes: list[tuple[fx.Node, tuple[Any, ...], dict[str, Any]]] = []
    values: list[tuple[fx.Node, Value | Values]] = []
    for a, b in pair.nodes():
        args, kwargs = _both(pair, a, a.args, b.args, same), _both(pair, a, a.kwargs, b.kwargs, same)
        if _has_line(args) or _has_line(kwargs):
            changes.append((a, args, kwargs))
        same[b] = a
        values.extend(_values(pair, a, b))
    guards = sizes.guards(first.asked, second.asked, pair.line)
    for node, value in values:
        facts.put(node, value)
    _write_sizes(first.graph, changes)
    return pair.offsets, guards


def agrees(first: Recording, third: Recording) -> None:
    """Check a merged recording against one at a third batch size.

    Raises:
        BatchMatters: some size does not lie on its line.
    """
    assert first.batch is not None and third.batch is not None
    firsts = [node for node in first.graph.nodes if node.target is not ops.affine and node.target != BATCH_SIZE]
    for a, b in zip(firsts, third.graph.nodes):
        held, seen = facts.get(a, Value), facts.get(b, Value)
        if a.target != b.target or (held and seen and held.shape_at(third.batch - first.batch) != seen.shape):
            raise BatchMatters(f"{_place(a)}: sizes do not grow linearly with the batch")
        if not _agree(a.args, b.args, third.batch) or not _agree(dict(a.kwargs), dict(b.kwargs), third.batch):
            raise BatchMatters(f"{_place(a)}: an argument does not grow linearly with the batch")


def _agree(a: Any, b: Any, batch: int) -> bool:
    if isinstance(a, fx.Node):
        if a.target is ops.affine:
            return bool(ops.affine(batch, *a.args[1:]) == b)
        return isinstance(b, fx.Node)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_agree(x, y, batch) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return all(_agree(a[key], b[key], batch) for key in a)
    if isinstance(a, slice):
        return all(_agree(getattr(a, end), getattr(b, end), batch) for end in ("start", "stop", "step"))
    return type(a) is type(b) and (a == b or a != a)


def _both(pair: Pair, node: fx.Node, a: Any, b: Any, same: dict[fx.Node, fx.Node]) -> Any:
    """One argument for both, with a `Line` where an integer differs."""
    if isinstance(a, fx.Node):
        if same.get(b) is not a:
            raise BatchMatters(f"{_place(node)}: it uses other values at batch {pair.m} than at batch {pair.n}")
        return a
    if type(a) is not type(b):
        raise BatchMatters(f"{_place(node)}: an argument is {a!r} at batch {pair.n} and {b!r} at batch {pair.m}")
    if isinstance(a, (tuple, list)) and len(a) == len(b):
        return type(a)(_both(pair, node, x, y, same) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and a.keys() == b.keys():
        return {key: _both(pair, node, a[key], b[key], same) for key in a}
    if isinstance(a, slice):
        return slice(*(_both(pair, node, getattr(a, end), getattr(b, end), same) for end in ("start", "stop", "step")))
    if a == b or a != a:
        return a
    if type(a) is int:
        return pair.line(a, b, node)
    if type(a) is float:
        return pair.float_line(a, b, node)
    raise BatchMatters(f"{_place(node)}: an argument is {a!r} at batch {pair.n} and {b!r} at batch {pair.m}")


def _has_line(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_line(item) for item in value)
    if isinstance(value, dict):
        return any(_has_line(item) for item in value.values())
    if isinstance(value, slice):
        return any(_has_line(end) for end in (value.start, value.stop, value.step))
    return isinstance(value, Line)


def _values(pair: Pair, a: fx.Node, b: fx.Node) -> Iterator[tuple[fx.Node, Value | Values]]:
    for kind in (Value, Values):
        held, seen = facts.get(a, kind), facts.get(b, kind)
        if held is not None or seen is not None:
            yield a, _sloped(pair, a, held, seen)


def _sloped(pair: Pair, node: fx.Node, a: Any, b: Any) -> Any:
    if isinstance(a, Values) and isinstance(b, Values) and len(a.items) == len(b.items):
        return Values(tuple(_sloped(pair, node, x, y) for x, y in zip(a.items, b.items, strict=True)))
    if isinstance(a, Value) and isinstance(b, Value):
        if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
            shapes = f"{a.shape} at batch {pair.n} and {b.shape} at batch {pair.m}"
            raise BatchMatters(f"{_place(node)}: the result has {shapes}")
        if a.shape == b.shape:
            return a
        slopes = tuple(0 if x == y else int(pair.line(x, y, node).slope) for x, y in zip(a.shape, b.shape, strict=True))
        return replace(a, slopes=slopes)
    if type(a) is not type(b) or a != b:
        raise BatchMatters(f"{_place(node)}: the result differs between batch {pair.n} and {pair.m}")
    return a


def _write_sizes(graph: fx.Graph, changes: list[tuple[fx.Node, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Put the `affine` nodes after the placeholders, one for each line."""
    if not changes:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    made: dict[tuple[type, Line], fx.Node] = {}
    with graph.inserting_before(first):
        batch = graph.placeholder(BATCH_SIZE)
    facts.put(batch, facts.Origin())

    def size(line: Line, user: fx.Node) -> fx.Node:
        key = type(line.slope), line
        if key not in made:
            with graph.inserting_before(first):
                made[key] = graph.call_function(ops.affine, (batch, line.slope, line.offset))
            facts.put(made[key], facts.origin(user))
        return made[key]

    for node, args, kwargs in changes:
        node.args, node.kwargs = _filled(args, node, size), _filled(kwargs, node, size)


def _filled(value: Any, node: fx.Node, size: Any) -> Any:
    if isinstance(value, Line):
        return size(value, node)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(item, node, size) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, node, size) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_filled(end, node, size) for end in (value.start, value.stop, value.step)))
    return value


def growing(first: Recording, second: Recording) -> tuple[tuple[int, ...], ...] | None:
    """The dims of every output that grow as the batch does; None when the outputs are not the same ones.

    Says where the batch lies in the outputs also when the graphs differ.
    """
    if first.output_names != second.output_names or first.batch is None or second.batch is None:
        return None
    found = []
    for a, b in zip(_shapes(first), _shapes(second), strict=True):
        if len(a) != len(b):
            return None
        change = second.batch - first.batch
        found.append(tuple(dim for dim, (x, y) in enumerate(zip(a, b, strict=True)) if y - x == change))
    return tuple(found)


def _shapes(recording: Recording) -> list[tuple[int, ...]]:
    (nodes,) = output_node(recording.graph).args
    return [facts.need(node, Value).shape for node in nodes]  # type: ignore[union-attr, arg-type]


def _place(node: fx.Node) -> str:
    return places.describe(facts.origin(node)) or f"node %{node.name}"
