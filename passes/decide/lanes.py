"""Lanes, clusters and groups: the network as the placement problem sees it.

- The *lane* of a value (see `rules`) is followed once through the graph.
- A *cluster* is a set of values that are all on their lanes or all replicated: an operation joins the cluster of the
  inputs it follows, and whatever reads one sliced tensor or calls one neuron layer is in one cluster.
- A *group* is a set of convolutions or linears that read one weight or bias (a time loop calls them T times, tied
  weights): they take the same row of the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from snnpart import facts
from snnpart.facts import Sharded
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.rules import Ask, Declined, Row
from snnpart.passes.decide.rules_matrix import is_matrix
from snnpart.passes.decide.table import follow, matrix_rows

REPLICATE = "replicate"


@dataclass(frozen=True, eq=False)
class Group:
    """Matrix operations with one weight; `rows[rule][i]` is the row of `nodes[i]`, `reasons` say what is missing."""

    path: str
    nodes: tuple[fx.Node, ...]
    rows: dict[str, tuple[Row, ...]]
    reasons: dict[str, str]

    @property
    def rules(self) -> tuple[str, ...]:
        return (*self.rows, REPLICATE)


@dataclass(frozen=True, eq=False)
class Cluster:
    """Values that are sharded or replicated together: results of `matrices`, and of `followers`."""

    matrices: tuple[fx.Node, ...]
    followers: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Lanes:
    """The placement problem's view: lanes, followers' rows, clusters, groups, and why an operation follows no lane."""

    lanes: dict[fx.Node, Sharded]
    rows: dict[fx.Node, Row]
    clusters: tuple[Cluster, ...]
    groups: tuple[Group, ...]
    reasons: dict[fx.Node, str]

    def cluster_of(self) -> dict[fx.Node, Cluster]:
        return {node: cluster for cluster in self.clusters for node in (*cluster.matrices, *cluster.followers)}

    def group_of(self) -> dict[fx.Node, Group]:
        return {node: group for group in self.groups for node in group.nodes}


def find_lanes(graph: SpikeGraph, tp: int) -> Lanes:
    """Follow the lanes through `graph`. A leaf of which one call cannot be sharded is sharded in none."""
    barred: set[str] = set()
    while True:
        walk = _Walk(graph, tp, barred)
        mixed = walk.mixed_leaves()
        if not mixed:
            lanes = {node: lane for node, lane in walk.lanes.items() if lane is not None}
            return Lanes(lanes, walk.rows, _clusters(walk), _groups(walk), walk.reasons)
        barred |= mixed


class _Walk:
    """One pass over the graph that finds lanes and rows."""

    def __init__(self, graph: SpikeGraph, tp: int, barred: set[str]) -> None:
        self.lanes: dict[fx.Node, Sharded | None] = {}
        self.rows: dict[fx.Node, Row] = {}
        self.matrices: dict[fx.Node, tuple[dict[str, Row], dict[str, str]]] = {}
        self.reasons: dict[fx.Node, str] = {}
        self.calls: dict[str, list[fx.Node]] = {}
        self.tied = graph.tied_leaves()
        ask = Ask(graph, tp, self.lanes)
        for node in graph.graph.nodes:
            if is_matrix(node):
                self._matrix(node, ask)
            elif node.op in ("call_function", "call_method", "call_module"):
                self._follower(node, ask, barred)

    def _matrix(self, node: fx.Node, ask: Ask) -> None:
        rows, reasons = self.matrices[node] = matrix_rows(node, ask)
        if "column" in rows:
            output = rows["column"].output
            self.lanes[node] = output if isinstance(output, Sharded) else None

    def _follower(self, node: fx.Node, ask: Ask, barred: set[str]) -> None:
        if node.op == "call_module":
            self.calls.setdefault(self.leaf(node), []).append(node)
        if all(ask.lane(n) is None for n in node.all_input_nodes):
            return
        try:
            if node.op == "call_module" and self.leaf(node) in barred:
                raise Declined("another call of the same layer cannot be sharded")
            found = follow(node, ask)
        except Declined as reason:
            self.reasons[node] = str(reason)
            return
        self.rows[node] = found
        self.lanes[node] = found.output if isinstance(found.output, Sharded) else None

    def leaf(self, node: fx.Node) -> str:
        """The leaf the node calls; of leaves that share a tensor the first."""
        return self.tied.get(str(node.target), str(node.target))

    def mixed_leaves(self) -> set[str]:
        """Leaves with both sharded and other calls."""
        return {path for path, calls in self.calls.items() if 0 < sum(node in self.rows for node in calls) < len(calls)}


def _clusters(walk: _Walk) -> tuple[Cluster, ...]:
    members = [node for node, lane in walk.lanes.items() if lane is not None]
    joined = nx.utils.UnionFind(members)
    first: dict[str, fx.Node] = {}
    for node, found in walk.rows.items():
        if node.op == "call_module":
            joined.union(first.setdefault(f"leaf {walk.leaf(node)}", node), node)
        for source, spread in zip(node.all_input_nodes, found.inputs):
            if isinstance(spread, Sharded) and walk.lanes.get(source) is not None:
                joined.union(source, node)
            elif isinstance(spread, Sharded) and is_tensor_read(source):
                joined.union(first.setdefault(f"tensor {source.target}", node), node)
    sets: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        sets.setdefault(joined[node], []).append(node)
    return tuple(
        Cluster(tuple(n for n in nodes if n in walk.matrices), tuple(n for n in nodes if n in walk.rows))
        for nodes in sets.values()
    )


def _groups(walk: _Walk) -> tuple[Group, ...]:
    joined = nx.utils.UnionFind(walk.matrices)
    first: dict[fx.Node | str, fx.Node] = {}
    for node in walk.matrices:
        for source in node.all_input_nodes[1:]:
            joined.union(first.setdefault(str(source.target) if is_tensor_read(source) else source, node), node)
    sets: dict[fx.Node, list[fx.Node]] = {}
    for node in walk.matrices:
        sets.setdefault(joined[node], []).append(node)
    return tuple(_group(walk, nodes) for nodes in sets.values())


def _group(walk: _Walk, nodes: list[fx.Node]) -> Group:
    """The group with the rows that all its members have, for the same slices of the weight."""
    rows: dict[str, tuple[Row, ...]] = {}
    reasons = {rule: why for node in nodes for rule, why in walk.matrices[node][1].items()}
    for rule in ("column", "row"):
        own = [walk.matrices[node][0].get(rule) for node in nodes]
        found = [item for item in own if item is not None]
        if len(found) == len(nodes) and len({tuple(_weight_spreads(n, r)) for n, r in zip(nodes, found)}) == 1:
            rows[rule] = tuple(found)
        else:
            reasons.setdefault(rule, "its calls would need different slices of the weight")
    return Group(min(path_of(node) for node in nodes), tuple(nodes), rows, reasons)


def _weight_spreads(node: fx.Node, found: Row) -> Iterable[object]:
    x = node.args[0]
    return [spread for source, spread in zip(node.all_input_nodes, found.inputs) if source is not x]


def path_of(node: fx.Node) -> str:
    """The user's name for the operation: the leaf, the module that owns the weight, or the module that computes it.

    A weight that is not called `weight` names its operation itself: a module may use several.
    """
    if node.op == "call_module":
        return str(node.target)
    weight = node.args[1] if len(node.args) > 1 else None
    if isinstance(weight, fx.Node) and is_tensor_read(weight):
        owner, _, name = str(weight.target).rpartition(".")
        return owner if owner and name == "weight" else str(weight.target)
    return facts.origin(node).module
