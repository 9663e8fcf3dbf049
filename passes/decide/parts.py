"""What a pipeline may cut apart: nodes that share a tensor, a neuron layer or state form one part.

- *keys* are what cannot be in two stages: the name of a tensor (or of a copy of it, see `tied`), the path of a leaf.
- a *part* is a strongly connected component of the graph in which the nodes of one key are one. A layer that a time
  loop calls T times is therefore one part, and so is everything on a cycle through it: time loops are cut in space.
- parts with a key are ordered (topologically, else as in the source). A part without one lies *with the latest of its
  inputs*: reductions then happen before a boundary is crossed.
- nodes *everywhere* are copied into each stage that needs them: program inputs, constants, sizes, and what is computed
  from these alone without tensors or random numbers. Tuples that only wrap values (`Bundle(v, i)`) are copied too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import networkx as nx
from torch import fx

from snnpart import facts
from snnpart.effects import is_random
from snnpart.facts import Copy, Value
from snnpart.graph import TRAINING, SpikeGraph
from snnpart.ops_time import leaf_paths

NOWHERE = -1
"""Position of a part that depends on no part with a key (random input noise): before all others."""


@dataclass(frozen=True, eq=False)
class Part:
    """Nodes of one strongly connected component, in graph order; `keys` is empty for one that only computes."""

    nodes: tuple[fx.Node, ...]
    keys: tuple[str, ...]
    position: int

    def inputs(self) -> Iterator[fx.Node]:
        """Nodes of other parts (or everywhere) that it uses."""
        own = set(self.nodes)
        return (n for node in self.nodes for n in node.all_input_nodes if n not in own)


@dataclass(frozen=True, eq=False)
class Parts:
    """All parts in topological order. `positions` counts those with keys; a part without one has the latest position
    of its inputs (`NOWHERE` if it has none). Nodes `everywhere` are in no part."""

    parts: tuple[Part, ...]
    everywhere: frozenset[fx.Node]

    @property
    def positions(self) -> int:
        return sum(bool(part.keys) for part in self.parts)

    @property
    def keyed(self) -> tuple[Part, ...]:
        """The parts with keys, by position."""
        return tuple(part for part in self.parts if part.keys)


def is_tensor_read(node: fx.Node) -> bool:
    """True for a `get_attr` of a tensor (not of the training flag)."""
    return node.op == "get_attr" and node.target != TRAINING


def is_bundle(node: fx.Node) -> bool:
    """True for a call that only wraps values in a tuple class; such a node cannot cross a boundary."""
    return node.op == "call_function" and isinstance(node.target, type) and facts.get(node, Value) is None


def everywhere(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that every stage can compute for itself from the program's inputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (
            node.op == "placeholder"
            or (node.op == "get_attr" and not is_tensor_read(node))
            or node.op in ("call_function", "call_method")
            and not is_random(node)
            and not leaf_paths(node)
            and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return frozenset(found)


def key_of(read: fx.Node) -> str:
    """What a read of a tensor goes by: the tensor's name, or that of the copy it reads."""
    copy = facts.get(read, Copy)
    return str(read.target) if copy is None else copy.key


def find_parts(graph: SpikeGraph, unkeyed: Container[str] = ()) -> Parts:
    """The parts of `graph`; reads of the tensors `unkeyed` join nothing."""
    free = everywhere(graph.graph)
    nodes = [node for node in graph.graph.nodes if node not in free and node.op != "output"]
    index = {node: i for i, node in enumerate(nodes)}
    keys, representative = _join(nodes, graph.tied_leaves(), unkeyed)
    condensed = nx.condensation(_dependencies(nodes, index, representative))
    members = _members(nodes, representative, condensed.graph["mapping"])
    order = nx.lexicographical_topological_sort(condensed, key=lambda part: index[members[part][0]])
    return _arrange(order, condensed, members, keys, free)


def _join(
    nodes: list[fx.Node], tied: Mapping[str, str], unkeyed: Container[str]
) -> tuple[dict[fx.Node, list[str]], dict[fx.Node, fx.Node]]:
    """Keys of each node, and for each node the one that stands for all joined with it."""
    joined = nx.utils.UnionFind(nodes)
    keys: dict[fx.Node, list[str]] = {}
    first: dict[str, fx.Node] = {}
    weights = weight_only(nodes)
    for node in nodes:
        own = (key_of(node),) if is_tensor_read(node) and node.target not in unkeyed else leaf_paths(node)
        for key in own:
            keys.setdefault(node, []).append(key)
            joined.union(first.setdefault(tied.get(key, key), node), node)
        if node in weights:
            joined.union(node, *(user for user in node.users if user.op != "output"))
    return keys, {node: joined[node] for node in nodes}


def weight_only(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Tensor reads and what is computed from them alone (a standardised weight, a decay from a time constant)."""
    found: set[fx.Node] = set()
    for node in nodes:
        computed = node.op in ("call_function", "call_method") and not is_random(node) and not leaf_paths(node)
        if is_tensor_read(node) or (computed and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _dependencies(
    nodes: list[fx.Node], index: dict[fx.Node, int], representative: dict[fx.Node, fx.Node]
) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(index[representative[node]] for node in nodes)
    graph.add_edges_from(
        (index[representative[source]], index[representative[node]])
        for node in nodes
        for source in node.all_input_nodes
        if source in index and representative[source] is not representative[node]
    )
    return graph


def _members(
    nodes: list[fx.Node], representative: dict[fx.Node, fx.Node], part_of: dict[int, int]
) -> dict[int, list[fx.Node]]:
    index = {node: i for i, node in enumerate(nodes)}
    members: dict[int, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(part_of[index[representative[node]]], []).append(node)
    return members


def _arrange(
    order: Iterator[int],
    condensed: nx.DiGraph,
    members: dict[int, list[fx.Node]],
    keys: dict[fx.Node, list[str]],
    free: frozenset[fx.Node],
) -> Parts:
    """Give parts with keys their positions in turn, the others the latest position of their inputs."""
    position: dict[int, int] = {}
    parts: list[Part] = []
    count = 0
    for part in order:
        own = tuple(dict.fromkeys(key for node in members[part] for key in keys.get(node, ())))
        before = max((position[earlier] for earlier in condensed.predecessors(part)), default=NOWHERE)
        position[part] = count if own else before
        count += bool(own)
        parts.append(Part(tuple(members[part]), own, position[part]))
    return Parts(tuple(parts), free)
