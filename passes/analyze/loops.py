"""Time loops: at which step of an unrolled loop a value is made.

A loop over T steps calls the same neuron layer, or the same layer's weights, T times. T is the number that most of
the layers are called; call k of such a layer is made at step k (in groups, when a layer is called several times a
step). Every other value is made at the latest step of what it is computed from. Where the input has a time dim,
indexing it with t gives a value of step t. A block that is called again in depth is no loop (see `reuse`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from snnpart import facts, ops
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import kinds, reuse
from snnpart.passes.analyze.kinds import argument, tensor_inputs

_WEIGHTED = ("conv", "linear", "norm", "matmul")


@dataclass(frozen=True)
class Loop:
    """The steps at which values are made, the groups of nodes that do the same work at successive steps, and T."""

    steps: Mapping[fx.Node, int]
    groups: Sequence[Sequence[fx.Node]]
    length: int = 1


def find(graph: SpikeGraph, *, early: bool = False) -> Loop:
    """The graph's time loop; no steps and no groups when there is none.

    Args:
        early: a frame is read at the latest step of the rest that goes into what reads it, as a state into which it
            goes is then of the step before; else what reads it is of the frame's step.
    """
    groups = _repeated(graph)
    length, whole = _length(graph, groups)
    times = {info.name: info.time_dim for info in graph.inputs if info.time_dim is not None}
    called = seeds(whole, length)
    steps = _spread(graph, called, times, length)
    known = {node: step for node, step in steps.items() if early or node in called or _read(node, times) is not None}
    for nodes in _reads(graph, steps, known, length) if whole else []:
        later = _spread(graph, seeds([*whole, nodes], length), times, length)
        if _too_early(later) <= _too_early(steps):
            whole, steps = [*whole, nodes], later
    return Loop(steps, whole, length)


def seeds(groups: Sequence[Sequence[fx.Node]], length: int) -> dict[fx.Node, int]:
    """The steps of the nodes of groups that are called at every step, or at all but the last ones."""
    return {node: place * length // max(length, len(nodes)) for nodes in groups for place, node in enumerate(nodes)}


def _repeated(graph: SpikeGraph) -> list[list[fx.Node]]:
    """Nodes that do the same work again: calls of one leaf, uses of one weight, one surrogate of one module."""
    groups: defaultdict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        kind = kinds.kind_of(node)
        if kind == "leaf":
            groups["leaf", node.target].append(node)
        elif kind == "surrogate":
            origin = facts.origin(node)
            groups["surrogate", origin.module, origin.file, origin.line].append(node)
        elif kind in _WEIGHTED:
            read = (item.target for item in node.all_input_nodes if item.op == "get_attr")
            weight = next((name for name in read if name in graph.tensors), None)
            if weight is not None:
                groups["weight", node.target, weight].append(node)
    return list(groups.values())


def _reads(
    graph: SpikeGraph, steps: Mapping[fx.Node, int], known: Mapping[fx.Node, int], length: int
) -> list[list[fx.Node]]:
    """The reads of single places of one tensor from outside the loop: of its frames, if there are as many. Those of the
    last steps may be missing: what nobody needs is not traced. Those of one line are taken apart where all of them are
    too many: a first state may be made like a frame (`zeros_like(x[0])`). `known`: steps that later reads leave."""
    groups: defaultdict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source not in steps and _is_whole(source):
            dim = _dim_read(node) if kinds.name_of(node) in ("select", "getitem") else None
            if dim is not None:
                groups[source, dim].append(node)
    return [nodes for group in groups.values() for nodes in _in_time(group, known, length)]


def _in_time(nodes: list[fx.Node], known: Mapping[fx.Node, int], length: int) -> Iterator[list[fx.Node]]:
    """The reads, or else those of one line, that come one a step."""
    if _one_a_step(nodes, known, length):
        yield nodes
        return
    lines: defaultdict[object, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        origin = facts.origin(node)
        lines[origin.module, origin.file, origin.line].append(node)
    yield from (line for line in lines.values() if len(line) < len(nodes) and _one_a_step(line, known, length))


def _is_whole(source: fx.Node) -> bool:
    """A tensor, or its frames as a tuple; not an operation with several results."""
    return kinds.value_of(source) is not None or kinds.name_of(source) == "unbind"


def _one_a_step(nodes: list[fx.Node], known: Mapping[fx.Node, int], length: int) -> bool:
    """Whether no call of a step reads what one of a later step would. What is computed of a read is of no step yet: it
    may go into a state, whose step is not known by what the step before left of it."""
    if len(nodes) % length == 0:
        return all(place * length // len(nodes) <= _needed(node, known, length) for place, node in enumerate(nodes))
    needed = [_needed(node, known, place) for place, node in enumerate(nodes)]
    return length < 2 * len(nodes) < 2 * length and all(step <= place for place, step in enumerate(needed))


def _too_early(steps: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The nodes that read what a later step makes. Where reads make some such, they are no frames but parts of an input
    of which every step reads what is made."""
    return {node for node, step in steps.items() if any(steps.get(item, step) > step for item in tensor_inputs(node))}


def _needed(node: fx.Node, steps: Mapping[fx.Node, int], default: int) -> int:
    """The step of the first that reads the node, itself or through what has no step."""
    while len(node.users) == 1 and node not in steps:
        (node,) = node.users
    return min([steps[item] for item in (node, *node.users) if item in steps], default=default)


def _dim_read(node: fx.Node) -> int | None:
    """The dim at which a number says which place is read, where one does."""
    if kinds.name_of(node) == "select":
        return _number(argument(node, 1, "dim")) if _number(argument(node, 2, "index")) is not None else None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    dims = [dim for dim, item in enumerate(index) if _number(item) is not None]
    return dims[0] if len(dims) == 1 and all(isinstance(item, (int, slice)) for item in index) else None


def _length(graph: SpikeGraph, groups: list[list[fx.Node]]) -> tuple[int, list[list[fx.Node]]]:
    """T, and the groups that are called at every step: those that most of the groups agree on and that are steps of
    time."""
    if graph.time_steps is not None:
        return graph.time_steps, _whole(groups, graph.time_steps)
    counts = {len(nodes) for nodes in groups if len(nodes) > 1}
    given = {info.shape[info.time_dim] for info in graph.inputs if info.time_dim is not None}
    scores = {steps: _score(groups, steps) + (steps in given) for steps in counts | given if steps > 1}
    for steps in sorted(scores, key=lambda steps: (scores[steps], steps), reverse=True):
        whole = _whole(groups, steps)
        if whole and reuse.is_time(graph, whole, seeds(whole, steps), steps):
            return steps, whole
    return max((steps for steps in scores if steps in given), default=1), []


def _whole(groups: list[list[fx.Node]], length: int) -> list[list[fx.Node]]:
    return [nodes for nodes in groups if len(nodes) % length == 0] if length > 1 else []


def _score(groups: list[list[fx.Node]], steps: int) -> float:
    """How many groups are called `steps` times, or in part those that are called a multiple of it."""
    return sum(steps / len(nodes) for nodes in groups if len(nodes) % steps == 0)


def _spread(graph: SpikeGraph, seeds: dict[fx.Node, int], times: dict[str, int], length: int) -> dict[fx.Node, int]:
    steps: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        own = seeds.get(node, _read(node, times))
        made = [steps[item] for item in tensor_inputs(node) if item in steps]
        if own is not None:
            steps[node] = own
        elif made and not _gathers(node, made, length):
            steps[node] = max(made)
    return steps


def _gathers(node: fx.Node, made: list[int], length: int) -> bool:
    """The values of all steps come together: from here on nothing belongs to one step."""
    joins = kinds.kind_of(node) == "join" or node.target is ops.index_assign
    return joins and len(set(made)) > 1 and len(made) >= min(length, 2)


def _read(node: fx.Node, times: dict[str, int]) -> int | None:
    """The step that is read from an input with a time dim."""
    source, name = (node.args[0] if node.args else None), kinds.name_of(node)
    if not isinstance(source, fx.Node) or name not in ("select", "getitem"):
        return None
    if kinds.name_of(source) == "unbind":
        inner = source.args[0]
        reads_time = isinstance(inner, fx.Node) and argument(source, 1, "dim", 0) == times.get(str(inner.target))
        return _number(node.args[1]) if reads_time else None
    dim = times.get(str(source.target)) if source.op == "placeholder" else None
    if dim is None:
        return None
    if name == "select":
        return _number(argument(node, 2, "index")) if argument(node, 1, "dim") == dim else None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    plain = len(index) > dim and all(isinstance(item, (int, slice)) for item in index[: dim + 1])
    return _number(index[dim]) if plain else None


def _number(index: Any) -> int | None:
    return index if isinstance(index, int) and not isinstance(index, bool) else None
