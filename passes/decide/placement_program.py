"""The integer program of `placement`, built from the graph and solved by HiGHS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, sparse
from torch import fx

from snnpart import facts
from snnpart.bits import gather_us
from snnpart.costs import MachineProfile
from snnpart.errors import PlanError
from snnpart.facts import Cost, Domain, Partial, Value
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.lanes import REPLICATE, Cluster, Group, Lanes
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.rules import R, Row
from snnpart.passes.decide.rules_matrix import data_of
from snnpart.passes.decide.rules_shape import carries_gradient, value_bytes

Reader = tuple[frozenset[int], frozenset[int], frozenset[int]]
"""The variables of the rules by which a matrix operation deals out its result, reads its share of the input, and reads
the whole input but gives only part of its gradient."""


@dataclass(frozen=True)
class Choice:
    """The rule of each group, and whether each cluster is sharded."""

    rules: dict[Group, str]
    states: dict[Cluster, bool]


@dataclass
class _Program:
    """A mixed-integer program under construction; every variable lies in [0, 1]."""

    costs: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, integer: bool = False) -> int:
        self.costs.append(cost)
        self.integer.append(int(integer))
        return len(self.costs) - 1

    def constrain(self, terms: Mapping[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append((dict(terms), low, high))

    def at_least(self, target: int, terms: Mapping[int, float], constant: float = 0.0) -> None:
        """target >= terms + constant."""
        merged: dict[int, float] = defaultdict(float, {target: 1.0})
        for variable, factor in terms.items():
            merged[variable] -= factor
        self.constrain(merged, low=constant)

    def solve(self) -> np.ndarray | None:
        if not self.costs:
            return np.zeros(0)
        entries = [(i, j, v) for i, (terms, _, _) in enumerate(self.rows) for j, v in terms.items()]
        row, column, value = (np.array(part) for part in zip(*entries)) if entries else (np.zeros(0, int),) * 3
        matrix = sparse.csr_array((value, (row, column)), shape=(len(self.rows), len(self.costs)))
        low, high = (np.array([item[k] for item in self.rows]) for k in (1, 2))
        found = optimize.milp(
            np.array(self.costs),
            integrality=np.array(self.integer),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix, low, high),
        )
        solution: np.ndarray | None = found.x
        return solution


def solve(
    graph: SpikeGraph, lanes: Lanes, tp: int, profile: MachineProfile, pins: Choice, *, shard_all: bool
) -> Choice:
    """The best choice under the pins.

    Raises:
        PlanError: the pins contradict each other.
    """
    build = _Builder(lanes, tp, profile, pins, shard_all)
    for node in graph.graph.nodes:
        build.traffic_of(node)
    build.finish()
    solution = build.program.solve()
    if solution is None:
        raise PlanError("no placement satisfies the pinned shards", where=graph.name, fix="pin fewer layers")
    rules = {group: max(variables, key=lambda rule: solution[variables[rule]]) for group, variables in build.y.items()}
    return Choice(rules, {cluster: bool(solution[variable] > 0.5) for cluster, variable in build.s.items()})


class _Builder:
    """Turns lanes and costs into the program. Names follow the statement in `placement`."""

    def __init__(self, lanes: Lanes, tp: int, profile: MachineProfile, pins: Choice, shard_all: bool) -> None:
        self.lanes, self.tp, self.profile = lanes, tp, profile
        self.group_of, self.cluster_of = lanes.group_of(), lanes.cluster_of()
        self.program = _Program()
        self.y = {group: self._group(group, pins.rules.get(group), shard_all) for group in lanes.groups}
        self.s = {cluster: self._cluster(cluster, pins.states.get(cluster)) for cluster in lanes.clusters}
        self._shared: dict[tuple[object, ...], float] = defaultdict(float)

    def _group(self, group: Group, pinned: str | None, shard_all: bool) -> dict[str, int]:
        us = _us(group.nodes)
        costs = {rule: us / self.tp + self._sums(group, rule) for rule in group.rows} | {REPLICATE: us}
        variables = {rule: self.program.variable(costs[rule], integer=True) for rule in group.rules}
        self.program.constrain(dict.fromkeys(variables.values(), 1.0), 1.0, 1.0)
        if pinned is not None:
            self.program.constrain({variables[pinned]: 1.0}, low=1.0)
        elif shard_all and group.rows:
            self.program.constrain({variables[REPLICATE]: 1.0}, high=0.0)
        return variables

    def _sums(self, group: Group, rule: str) -> float:
        """Messages of the results that the rule leaves as sums over ranks."""
        pairs = zip(group.nodes, group.rows[rule])
        return sum(self._sum(node, row) for node, row in pairs)

    def _sum(self, node: fx.Node, row: Row) -> float:
        if isinstance(row.output, Partial):
            return self._reduce(node)
        if row.rule == "scatter":
            return self._cut(node) * (2 if carries_gradient(node) else 1)
        return 0.0

    def _variables(self, node: fx.Node, rules: Iterable[str]) -> frozenset[int]:
        return frozenset(self.y[self.group_of[node]][rule] for rule in rules)

    def _cluster(self, cluster: Cluster, pinned: bool | None) -> int:
        us = _us(cluster.followers)
        inside = [spread for node in cluster.followers for spread in self._inside(node)]
        state = self.program.variable(us / self.tp - us + sum(inside), integer=True)
        columns = {
            variable
            for node in cluster.matrices
            for variable in self._variables(node, self.group_of[node].dealing(node))
        }
        if pinned is not None:
            self.program.constrain({state: 1.0}, float(pinned), float(pinned))
        else:
            for column in columns:
                self.program.at_least(state, {column: 1.0})
            self.program.constrain({state: 1.0, **dict.fromkeys(columns, -1.0)}, high=0.0)
        return state

    def _inside(self, node: fx.Node) -> Iterable[float]:
        """What one follower costs in messages when its cluster is sharded."""
        found = self.lanes.rows[node]
        for i, (source, spread) in enumerate(zip(node.all_input_nodes, found.inputs)):
            gradient = carries_gradient(source)
            if spread == R:
                yield self._reduce(source) if i in found.partial else 0.0
            elif source not in self.cluster_of:
                yield self._cut(source) if gradient and not is_tensor_read(source) else 0.0
            elif self.lanes.lanes[source] != spread:
                yield self._gather(source) + (self._cut(source) if gradient else 0.0)

    def traffic_of(self, node: fx.Node) -> None:
        """Messages between the node's result and what reads it. Collected by (kind, cluster, readers)."""
        cluster = self.cluster_of.get(node)
        matrices = [user for user in node.users if user in self.group_of and data_of(user) is node]
        names = frozenset(self._reader(user) for user in matrices)
        if carries_gradient(node):
            self._shared["h", None, names] += self._reduce(node)
            self._shared["k", cluster, names] += self._cut(node)
        if cluster is not None:
            whole = any(user not in self.group_of and not self._on_lane(user, node) for user in node.users)
            self._shared["a", cluster, None if whole else names] += self._gather(node)
            if names and not whole and carries_gradient(node):
                self._shared["f", cluster, names] += self._reduce(node) - self._cut(node)
        if node in self.group_of and cluster is not None:
            self._shared["pq", cluster, frozenset([self._reader(node)])] += self._cut(node)

    def _reader(self, node: fx.Node) -> Reader:
        group = self.group_of[node]
        dealing, slicing = group.dealing(node), group.slicing(node)
        return (
            self._variables(node, dealing),
            self._variables(node, slicing),
            self._variables(node, set(group.rows) - set(slicing)),
        )

    def _on_lane(self, user: fx.Node, node: fx.Node) -> bool:
        found = self.lanes.rows.get(user)
        return found is not None and dict(zip(user.all_input_nodes, found.inputs))[node] != R

    def finish(self) -> None:
        """Turn the collected messages into variables and constraints."""
        for (kind, cluster, readers), cost in self._shared.items():
            state = {self.s[cluster]: 1.0} if isinstance(cluster, Cluster) else {}
            if readers is None:
                self.program.at_least(self.program.variable(cost), state)
            elif kind == "f":
                self._saving(state, readers, cost)  # type: ignore[arg-type]
            elif readers and cost > 0:
                self._message(str(kind), state, readers, cost)  # type: ignore[arg-type]

    def _message(self, kind: str, state: Mapping[int, float], readers: Iterable[Reader], cost: float) -> None:
        target = self.program.variable(cost)
        opposite = {variable: -factor for variable, factor in state.items()}
        for dealing, slicing, whole in readers:
            sliced = dict.fromkeys(slicing, 1.0)
            if kind == "h":
                self.program.at_least(target, dict.fromkeys(whole, 1.0))
            elif kind == "k":
                self.program.at_least(target, {**sliced, **opposite})
            elif kind == "a":
                self.program.at_least(target, {**state, **dict.fromkeys(slicing, -1.0)})
            elif kind == "pq":
                dealt = dict.fromkeys(dealing, 1.0)
                self.program.at_least(target, {**dealt, **opposite})
                self.program.at_least(target, {**state, **dict.fromkeys(dealing, -1.0)})

    def _saving(self, state: Mapping[int, float], readers: Iterable[Reader], saved: float) -> None:
        """A gather and the sum of its gradient in one: a reduce-scatter for an all-reduce. Only where nobody reads the
        whole value with a whole gradient."""
        target = self.program.variable(-saved)
        self.program.constrain({target: 1.0, **{variable: -factor for variable, factor in state.items()}}, high=0.0)
        together: dict[int, float] = {target: 1.0}
        for _, slicing, whole in readers:
            self.program.constrain({target: 1.0, **dict.fromkeys(slicing | whole, -1.0)}, high=0.0)
            together.update(dict.fromkeys(whole, -1.0))
        self.program.constrain(together, high=0.0)

    def _gather(self, node: fx.Node) -> float:
        """Gathering the value forward, as bits where that is faster."""
        value = facts.get(node, Value)
        if value is None:
            return self._cut(node)
        return gather_us(self.profile, "tp", value, facts.get(node, Domain), self.tp)[0]

    def _cut(self, node: fx.Node) -> float:
        """Gathering, or summing and scattering, something of the value's size in its own dtype."""
        return self.profile.all_gather_us("tp", value_bytes(node), self.tp)

    def _reduce(self, node: fx.Node) -> float:
        return self.profile.all_reduce_us("tp", value_bytes(node), self.tp)


def _us(nodes: Iterable[fx.Node]) -> float:
    return sum(cost.us for node in nodes if (cost := facts.get(node, Cost)) is not None)
