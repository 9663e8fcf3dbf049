"""The rules of the IR, checked after every pass.

Levels, each with the facts that every node which makes a tensor must hold:

    traced     Value, Origin
    analysed   + TimeRole, Domain, Cost
    placed     + Placement, Stage

A broken rule is reported in one line, with the node's text, the user's line and ten neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from torch import fx

from snnpart import effects, facts
from snnpart.errors import VerifyError
from snnpart.facts import Cost, Domain, Placement, Stage, TimeRole, Value, Values
from snnpart.graph import BATCH_SIZE, TRAINING, SpikeGraph, output_node
from snnpart.ops_time import Loop, leaf_paths

Level = Literal["traced", "analysed", "placed"]
FACTS: dict[Level, tuple[type, ...]] = {
    "traced": (),
    "analysed": (TimeRole, Domain, Cost),
    "placed": (TimeRole, Domain, Cost, Placement, Stage),
}
Broken = Iterator[tuple[fx.Node, str]]


def level_of(written: Iterable[str]) -> Level:
    """The highest level whose facts have all been written."""
    names = set(written)
    reached: Level = "traced"
    for level, kinds in FACTS.items():
        if {kind.__name__ for kind in kinds} <= names:
            reached = level
    return reached


def verify(graph: SpikeGraph, level: Level = "traced", *, after: str = "") -> None:
    """Check every rule of `level`.

    Raises:
        VerifyError: the first broken rule, with the node's text and neighbours; `after` names the pass that ran last.
    """
    for rule in RULES:
        for node, what in rule(graph):
            raise broken(node, what, after)
    for node, what in _facts_present(graph, level):
        raise broken(node, what, after)


def broken(node: fx.Node, what: str, after: str = "") -> VerifyError:
    """The error for a broken rule at `node`."""
    where = facts.place(node) + (f", after pass '{after}'" if after else "")
    return VerifyError(f"{what}\n{neighbours(node)}", where=where)


def neighbours(node: fx.Node, count: int = 10) -> str:
    """The node's line marked with `>`, among the `count` lines around it."""
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    first = max(0, at - count // 2)
    lines = (f"{'>' if one is node else ' '} {_line(one)}" for one in islice(nodes, first, first + count + 1))
    return "\n".join(lines)


def _line(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", repr(node.target))
    args = ", ".join(str(arg) for arg in node.args)
    kwargs = "".join(f", {key}={value}" for key, value in node.kwargs.items())
    line = f"%{node.name} = {node.op} {name}({args}{kwargs})"
    return line if len(line) < 160 else line[:157] + "..."


def _order(graph: SpikeGraph) -> Broken:
    seen: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield node, f"it uses %{used.name}, which is not defined before it"
        seen.add(node)


def _placeholders(graph: SpikeGraph) -> Broken:
    body = False
    names = [info.name for info in graph.inputs]
    found: list[str] = []
    for node in graph.graph.nodes:
        body = body or node.op != "placeholder"
        if node.op == "placeholder":
            if body:
                yield node, "a placeholder stands after other nodes"
            found.append(str(node.target))
    expected = [names, [*names, BATCH_SIZE]]
    if found not in expected:
        yield next(iter(graph.graph.nodes)), f"the placeholders are {found}, the inputs are {names}"


def _output(graph: SpikeGraph) -> Broken:
    outputs = [node for node in graph.graph.nodes if node.op == "output"]
    last = next(iter(reversed(graph.graph.nodes)))
    if len(outputs) != 1 or last.op != "output":
        yield last, f"the graph has {len(outputs)} outputs, or nodes after it; it must end with its only output"
        return
    value = outputs[0].args[0]
    if not isinstance(value, tuple) or not all(isinstance(item, fx.Node) for item in value):
        yield outputs[0], "the output is not one flat tuple of nodes"
    elif len(value) != len(graph.outputs):
        yield outputs[0], f"the output has {len(value)} values, the graph says {len(graph.outputs)}"


def _targets(graph: SpikeGraph) -> Broken:
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target != TRAINING and node.target not in graph.tensors:
            yield node, f"it reads '{node.target}', which is not among the graph's tensors"
        elif node.op == "call_module" and node.target not in graph.leaves:
            yield node, f"it calls '{node.target}', which is not among the graph's leaves"
        elif node.op == "call_function" and not callable(node.target):
            yield node, f"its target {node.target!r} is not a function"
        elif node.op == "call_method" and not node.args:
            yield node, "it calls a method on nothing"


def _loops(graph: SpikeGraph) -> Broken:
    """A loop's graphs take what the loop is given, return carried values and results, and call known leaves."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        unknown = [path for path in leaf_paths(node) if path not in graph.leaves]
        if unknown:
            yield node, f"it calls {unknown}, which are not among the graph's leaves"
        taken, made = sum(len(part) for part in node.args), len(node.args[2]) + len(node.target.keep)  # type: ignore[arg-type, misc]
        for inner in node.target.graphs:
            if sum(one.op == "placeholder" for one in inner.nodes) != taken:
                yield node, f"it is given {taken} values, which is not what its graphs take"
            if len(output_node(inner).args[0]) != made:  # type: ignore[arg-type]
                yield node, f"its graphs do not return the {made} values that it carries and keeps"
            if any(one.op == "get_attr" for one in inner.nodes):
                yield node, "a graph inside it reads a tensor that it is not given"


def _functional(graph: SpikeGraph) -> Broken:
    for node in graph.graph.nodes:
        if effects.is_in_place(node) and not _writes_own_copy(node):
            yield node, "it writes in place into a value that others may read"


def _writes_own_copy(node: fx.Node) -> bool:
    """In-place methods without a functional twin work on a clone that only they see."""
    copy = node.args[0]
    return isinstance(copy, fx.Node) and len(copy.users) == 1 and _is_clone(copy)


def _is_clone(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", node.target) == "clone"


def _values(graph: SpikeGraph) -> Broken:
    for node in graph.graph.nodes:
        held = facts.every(node)
        if Value in held and Values in held:
            yield node, "it holds both Value and Values"
        elif Value in held:
            value = held[Value]
            if len(value.slopes) != len(value.shape) or (value.stride and len(value.stride) != len(value.shape)):
                yield node, f"shape {value.shape}, slopes {value.slopes} and stride {value.stride} differ in length"
            elif graph.batch_fixed and any(value.slopes):
                yield node, f"it grows with the batch, but the batch is fixed: {graph.batch_fixed}"
        elif node.op == "placeholder" and node.target != BATCH_SIZE:
            yield node, "the input has no Value"


def _getitems(graph: SpikeGraph) -> Broken:
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") != "getitem" or not isinstance(node.args[0], fx.Node):
            continue
        several, index = facts.get(node.args[0], Values), node.args[1]
        if several is None:
            continue
        count = len(several.items)
        if not isinstance(index, int) or not -count <= index < count:
            yield node, f"it takes item {index!r} of {count} results"
        elif isinstance(several.items[index], Value) and facts.get(node, Value) is None:
            yield node, "it takes a tensor out of several results, but has no Value"


def _outputs_have_values(graph: SpikeGraph) -> Broken:
    last = output_node(graph.graph)
    for node in last.all_input_nodes:
        if facts.get(node, Value) is None:
            yield node, "the program returns it, but it is no tensor (it has no Value)"


def _batch_size(graph: SpikeGraph) -> Broken:
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.target == BATCH_SIZE and not node.users:
            yield node, "no size depends on the batch, so there must be no batch_size"


def _facts_present(graph: SpikeGraph, level: Level) -> Broken:
    kinds = FACTS[level]
    for node in graph.graph.nodes if kinds else ():
        if facts.get(node, Value) is None or node.op == "output":
            continue
        missing = [kind.__name__ for kind in kinds if facts.get(node, kind) is None]
        if missing:
            yield node, f"level '{level}' needs the facts {missing} here"


Rule = Callable[[SpikeGraph], Broken]
RULES: tuple[Rule, ...] = (
    _order,
    _placeholders,
    _output,
    _targets,
    _loops,
    _functional,
    _values,
    _getitems,
    _outputs_have_values,
    _batch_size,
)
