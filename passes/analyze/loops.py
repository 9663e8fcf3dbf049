"""Time loops: at which step of an unrolled loop a value is made.

A loop over T steps calls the same neuron layer, or the same layer's weights, T times. T is the number that most of
the layers are called; call k of such a layer is made at step k (in groups, when a layer is called several times a step).
Every other value is made at the latest step of what it is computed from. Where the input has a time dim, indexing it
with t gives a value of step t.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import fx

from snnpart import facts, ops
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import argument, tensor_inputs

_WEIGHTED = ("conv", "linear", "norm")


def find(graph: SpikeGraph) -> dict[fx.Node, int]:
    """The step of every value that is made inside a time loop; empty when there is no loop."""
    groups = _repeated(graph)
    length = _length(graph, groups)
    if length < 2:
        return {}
    seeds = {node: place * length // len(nodes) for nodes in groups if len(nodes) % length == 0 for place, node in enumerate(nodes)}
    times = {info.name: info.time_dim for info in graph.inputs if info.time_dim is not None}
    return _spread(graph, seeds, times, length)


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
            weights = [item.target for item in node.all_input_nodes if item.op == "get_attr" and item.target in graph.tensors]
            if weights:
                groups["weight", node.target, weights[0]].append(node)
    return list(groups.values())


def _length(graph: SpikeGraph, groups: list[list[fx.Node]]) -> int:
    if graph.time_steps is not None:
        return graph.time_steps
    counts = Counter(len(nodes) for nodes in groups if len(nodes) > 1)
    return max(counts, key=lambda count: (counts[count], -count)) if counts else 1


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
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "placeholder" or str(source.target) not in times:
        return None
    dim, name = times[str(source.target)], kinds.name_of(node)
    if name == "select" and argument(node, 1, "dim") == dim:
        index = argument(node, 2, "index")
        return index if isinstance(index, int) else None
    if name != "getitem":
        return None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    exact = len(index) > dim and Ellipsis not in index[: dim + 1] and None not in index[: dim + 1]
    return index[dim] if exact and isinstance(index[dim], int) else None
