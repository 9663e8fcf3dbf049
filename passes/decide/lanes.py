"""Lanes, clusters and groups: the network as the placement problem sees it.

- The *lane* of a value (see `rules`) is followed once through the graph.
- A *cluster* is a set of values that are all on their lanes or all replicated: an operation joins the cluster of the
  inputs it follows, and whatever reads one sliced tensor or calls one neuron layer is in one cluster.
- A *group* is a set of convolutions or linears that read one weight or bias (a time loop calls them T times, tied
  weights): they take the same row of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Sharded, Spread
from snnpart.graph import SpikeGraph
from snnpart.ops_time import leaf_paths
from snnpart.passes.analyze.kinds import layer_of
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.rules import Ask, Deal, Declined, Misdealt, Row, extent, is_tensor
from snnpart.passes.decide.rules_matrix import data_of, is_matrix, weight_of
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

    def dealing(self, node: fx.Node) -> tuple[str, ...]:
        """The rules by which the result of `node` is dealt out over the ranks.

        A rule is named for the first of `nodes`: with an embedding in front, "column" sums over a tied head's input.
        """
        return tuple(rule for rule in self.rows if isinstance(self._row(rule, node).output, Sharded))

    def slicing(self, node: fx.Node) -> tuple[str, ...]:
        """The rules by which `node` reads only the rank's share of its input."""
        at = node.all_input_nodes.index(data_of(node))
        return tuple(rule for rule in self.rows if isinstance(self._row(rule, node).inputs[at], Sharded))

    def _row(self, rule: str, node: fx.Node) -> Row:
        return self.rows[rule][self.nodes.index(node)]


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
    tp: int

    def cluster_of(self) -> dict[fx.Node, Cluster]:
        return {node: cluster for cluster in self.clusters for node in (*cluster.matrices, *cluster.followers)}

    def group_of(self) -> dict[fx.Node, Group]:
        return {node: group for group in self.groups for node in group.nodes}


def find_lanes(graph: SpikeGraph, tp: int) -> Lanes:
    """Follow the lanes through `graph`. A leaf of which one call cannot be sharded is sharded in none, and channels are
    dealt out as the operations below ask for, as far as that can be met."""
    barred: set[str] = set()
    deals = Deals(tp)
    while True:
        walk = _Walk(graph, tp, barred, deals)
        mixed = walk.mixed_leaves()
        if deals.changed(walk):
            continue
        if not mixed:
            lanes = {node: lane for node, lane in walk.lanes.items() if lane is not None}
            return Lanes(lanes, walk.rows, _clusters(walk), _groups(walk), walk.reasons, tp)
        barred |= mixed


class Deals(Mapping[fx.Node, Deal]):
    """How each matrix operation deals its channels; operations with one weight deal alike."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self._deals: dict[fx.Node | str, Deal] = {}

    def __getitem__(self, node: fx.Node) -> Deal:
        return self._deals.get(weight_key(weight_of(node)), Deal())

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(())

    def __len__(self) -> int:
        return len(self._deals)

    def get(self, node: fx.Node, default: Any = None) -> Deal:  # type: ignore[override]
        return self[node]

    def changed(self, walk: _Walk) -> bool:
        """Take up the demands of the walk; True when some layer now deals otherwise."""
        before = dict(self._deals)
        for demand, sources in walk.demands:
            for source in sources:
                lane = walk.lanes[source]
                if lane is not None:
                    self._take(weight_key(weight_of(source)), demand, extent(lane.pieces))
        return before != self._deals

    def _take(self, key: fx.Node | str, demand: Misdealt, channels: int) -> None:
        asked = self._deals.get(key, Deal()).asked(demand, channels)
        try:
            asked.pieces(channels, self.tp)
        except Declined:
            return
        self._deals[key] = asked


def weight_key(weight: Any) -> fx.Node | str:
    """The tensor's name, or the node that computes the weight."""
    key: fx.Node | str = str(weight.target) if is_tensor_read(weight) else weight
    return key


class _Walk:
    """One pass over the graph that finds lanes and rows."""

    def __init__(self, graph: SpikeGraph, tp: int, barred: set[str], deals: Deals) -> None:
        self.lanes: dict[fx.Node, Sharded | None] = {}
        self.rows: dict[fx.Node, Row] = {}
        self.matrices: dict[fx.Node, tuple[dict[str, Row], dict[str, str]]] = {}
        self.reasons: dict[fx.Node, str] = {}
        self.calls: dict[str, list[fx.Node]] = {}
        self.demands: list[tuple[Misdealt, frozenset[fx.Node]]] = []
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.tied = graph.tied_leaves()
        self.read_besides = _read_besides(graph, self.tied)
        ask = Ask(graph, tp, self.lanes, deals)
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
            self.sources[node] = frozenset({node})

    def _follower(self, node: fx.Node, ask: Ask, barred: set[str]) -> None:
        if node.op == "call_module":
            self.calls.setdefault(self.leaf(node), []).append(node)
        if all(ask.lane(n) is None for n in node.all_input_nodes):
            return
        try:
            if node.op == "call_module" and self.leaf(node) in barred:
                raise Declined("another call of the same layer cannot be sharded")
            self._check_alone(node)
            found = follow(node, ask)
        except Declined as reason:
            self.reasons[node] = str(reason)
            if isinstance(reason, Misdealt):
                self.demands.append((reason, self._sources_of(node)))
            return
        self.rows[node] = found
        self.lanes[node] = found.output if isinstance(found.output, Sharded) else None
        self.sources[node] = self._sources_of(node)

    def _check_alone(self, node: fx.Node) -> None:
        """A rank's gradient of a leaf's number is a part of the sum, that of the network's own reads is whole."""
        for path in leaf_paths(node):
            name = self.read_besides.get(self.tied.get(path, path))
            if name is not None:
                raise Declined(f"forward also reads '{name}', which learns, outside the layer")

    def _sources_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """The matrix operations whose deal decides how the inputs of `node` lie; none behind a concatenation."""
        if node.target is torch.cat:
            return frozenset()
        return frozenset().union(*(self.sources.get(n, frozenset()) for n in node.all_input_nodes))

    def leaf(self, node: fx.Node) -> str:
        """The leaf the node calls; of leaves that share a tensor the first."""
        return self.tied.get(str(node.target), str(node.target))

    def mixed_leaves(self) -> set[str]:
        """Leaves with both sharded and other calls."""
        return {path for path, calls in self.calls.items() if 0 < sum(node in self.rows for node in calls) < len(calls)}


def _read_besides(graph: SpikeGraph, tied: Mapping[str, str]) -> dict[str, str]:
    """The leaves with a learned tensor that the network also reads itself: that tensor, by the first of tied leaves."""
    reads = [str(node.target) for node in graph.graph.nodes if is_tensor_read(node)]
    return {tied[name]: name for name in reads if name in tied and graph.tensors[name].tensor.requires_grad}


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
        data = data_of(node)
        for source in node.all_input_nodes:
            if source is not data and is_tensor(source):
                joined.union(first.setdefault(weight_key(source), node), node)
    sets: dict[fx.Node, list[fx.Node]] = {}
    for node in walk.matrices:
        sets.setdefault(joined[node], []).append(node)
    return tuple(_group(walk, nodes) for nodes in sets.values())


def _group(walk: _Walk, nodes: list[fx.Node]) -> Group:
    """The group with the rows that all its members have, for the same slices of what they share. Rules are named by the
    first member: a head tied to an embedding takes the row that cuts the weight as the embedding's does."""
    rows: dict[str, tuple[Row, ...]] = {}
    reasons = {rule: why for node in nodes for rule, why in walk.matrices[node][1].items()}
    for rule, start in walk.matrices[nodes[0]][0].items():
        chosen, slices = [start], _slices(nodes[0], start)
        for node in nodes[1:]:
            fitting = [found for found in walk.matrices[node][0].values() if _agree(slices, _slices(node, found))]
            found = min(fitting, key=lambda found: found.rule != rule, default=None)
            if found is not None:
                chosen.append(found)
                slices |= _slices(node, found)
        if len(chosen) == len(nodes):
            rows[rule] = tuple(replace(found, rule=rule) for found in chosen)
        else:
            reasons.setdefault(rule, "its calls would need different slices of the weight")
    return Group(min(path_of(node) for node in nodes), tuple(nodes), rows, reasons)


def _slices(node: fx.Node, found: Row) -> dict[fx.Node | str, Spread]:
    """How a row needs the tensors of the network to lie."""
    data = data_of(node)
    pairs = zip(node.all_input_nodes, found.inputs)
    return {weight_key(source): spread for source, spread in pairs if source is not data and is_tensor(source)}


def _agree(one: Mapping[fx.Node | str, Spread], other: Mapping[fx.Node | str, Spread]) -> bool:
    return all(other[key] == spread for key, spread in one.items() if key in other)


def path_of(node: fx.Node) -> str:
    """The user's name for the operation: the leaf, the module that owns the weight, or the module that computes it.

    A weight that is not called `weight` names its operation itself: a module may use several.
    """
    if node.op == "call_module":
        return str(node.target)
    at = 2 if node.target is torch.einsum else 1
    weight = node.args[at] if len(node.args) > at else None
    if isinstance(weight, fx.Node) and is_tensor_read(weight):
        return layer_of(str(weight.target))
    return facts.origin(node).module or (_owner(weight) if isinstance(weight, fx.Node) else "")


def _owner(weight: fx.Node) -> str:
    """The module that owns the first tensor a computed weight is made of; empty where it is made of an activation."""
    while not is_tensor_read(weight):
        if weight.op not in ("call_function", "call_method") or not weight.all_input_nodes:
            return ""
        weight = weight.all_input_nodes[0]
    return str(weight.target).rpartition(".")[0]
