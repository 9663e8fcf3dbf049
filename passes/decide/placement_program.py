"""The integer program of `placement`, built from the graph and solved by HiGHS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from snnpart import facts
from snnpart.bits import gather_us
from snnpart.costs import MachineProfile
from snnpart.errors import PlanError
from snnpart.facts import Block, Cost, Domain, Partial, Value
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.integer_program import IntegerProgram
from snnpart.passes.decide.lanes import REPLICATE, Cluster, Group, Lanes
from snnpart.passes.decide.memory import OverMemory, bytes_of_rank
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.rules import R, Row
from snnpart.passes.decide.rules_matrix import data_of
from snnpart.passes.decide.rules_shape import carries_gradient, value_bytes
from snnpart.passes.rewrite.shared_statistics import STATISTICS, statistics_us

Reader = tuple[frozenset[int], frozenset[int], frozenset[int]]
"""The variables of the rules by which a matrix operation deals out its result, reads its share of the input, and reads
the whole input but gives only part of its gradient."""


MANY = 500
"""From so many groups on, the repetitions of a block are decided alike."""


@dataclass(frozen=True)
class Choice:
    """The rule of each group, and whether each cluster is sharded."""

    rules: dict[Group, str]
    states: dict[Cluster, bool]


def solve(
    graph: SpikeGraph,
    lanes: Lanes,
    tp: int,
    profile: MachineProfile,
    pins: Choice,
    *,
    shard_all: bool,
    memory: float | None = None,
) -> Choice:
    """The best choice under the pins with which a rank holds at most `memory` bytes.

    Raises:
        PlanError: the pins contradict each other.
        OverMemory: every choice holds more.
    """
    build = _built(graph, lanes, tp, profile, pins, shard_all)
    if memory is not None:
        tensors, saved = bytes_of_rank(graph, build)
        build.program.constrain(tensors.plus(saved).terms, high=memory - tensors.constant - saved.constant)
    solution = build.program.solve()
    if solution is None and memory is not None:
        raise OverMemory(*least_bytes(graph, lanes, tp, profile, pins, shard_all=shard_all))
    if solution is None:
        raise _contradiction(graph)
    return build.choice(solution.tolist())


def least_bytes(
    graph: SpikeGraph, lanes: Lanes, tp: int, profile: MachineProfile, pins: Choice, *, shard_all: bool = False
) -> tuple[float, float]:
    """Bytes of tensors and of saved values on a rank under the choice that holds least.

    Raises:
        PlanError: the pins contradict each other.
    """
    build = _built(graph, lanes, tp, profile, pins, shard_all)
    tensors, saved = bytes_of_rank(graph, build)
    solution = build.program.solve(tensors.plus(saved).terms)
    if solution is None:
        raise _contradiction(graph)
    return tensors.at(solution.tolist()), saved.at(solution.tolist())


def _contradiction(graph: SpikeGraph) -> PlanError:
    return PlanError("no placement satisfies the pinned shards", where=graph.name, fix="pin fewer layers")


def _built(graph: SpikeGraph, lanes: Lanes, tp: int, profile: MachineProfile, pins: Choice, shard_all: bool) -> Builder:
    build = Builder(lanes, tp, profile, pins, shard_all)
    for node in graph.graph.nodes:
        build.traffic_of(node)
    build.finish()
    return build


class Builder:
    """Turns lanes and costs into the program. Names follow the statement in `placement`."""

    def __init__(self, lanes: Lanes, tp: int, profile: MachineProfile, pins: Choice, shard_all: bool) -> None:
        self.lanes, self.tp, self.profile = lanes, tp, profile
        self.group_of, self.cluster_of = lanes.group_of(), lanes.cluster_of()
        self.program = IntegerProgram()
        self._alike: dict[tuple[object, ...], dict[str, int]] = {}
        self._ties = len(lanes.groups) >= MANY
        self._loose = _occurrences(pins)
        self.y = {group: self._group(group, pins.rules.get(group), shard_all) for group in lanes.groups}
        self.s = {cluster: self._cluster(cluster, pins.states.get(cluster)) for cluster in lanes.clusters}
        self._shared: dict[tuple[object, ...], float] = defaultdict(float)

    def choice(self, solution: Sequence[float]) -> Choice:
        """What a solution says."""
        rules = {group: max(found, key=lambda rule: solution[found[rule]]) for group, found in self.y.items()}
        return Choice(rules, {cluster: bool(solution[variable] > 0.5) for cluster, variable in self.s.items()})

    def _variables_of(self, nodes: tuple[fx.Node, ...], costs: Mapping[str, float]) -> tuple[dict[str, int], bool]:
        """A variable for each of the costs, and whether they are new: where repetitions of a block are decided alike,
        they share the variables of the first."""
        places = self._places(nodes) if self._ties else None
        key = None if places is None else (places, *costs)
        if key is None or key not in self._alike:
            variables = {name: self.program.variable(cost, integer=True) for name, cost in costs.items()}
            if key is not None:
                self._alike[key] = variables
            return variables, True
        variables = self._alike[key]
        for name, cost in costs.items():
            self.program.costs[variables[name]] += cost
        return variables, False

    def _places(self, nodes: tuple[fx.Node, ...]) -> tuple[object, ...] | None:
        """Where the nodes are in a repeated block; None where one is in none, or in one that a pin touches."""
        blocks = [facts.get(node, Block) for node in nodes]
        found = [block for block in blocks if block is not None and (block.name, block.index) not in self._loose]
        if len(found) < len(blocks) or len({(block.name, block.index) for block in found}) != 1:
            return None
        return (found[0].name, *(block.position for block in found))

    def _group(self, group: Group, pinned: str | None, shard_all: bool) -> dict[str, int]:
        whole, share = _us(group.nodes), _us(group.nodes, self.tp)
        costs = {rule: share + self._sums(group, rule) for rule in group.rows} | {REPLICATE: whole}
        variables, new = self._variables_of(group.nodes, costs)
        if not new:
            return variables
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
            return self._scatter(node) + (self._cut(node) if carries_gradient(node) else 0.0)
        return 0.0

    def _variables(self, node: fx.Node, rules: Iterable[str]) -> frozenset[int]:
        return frozenset(self.y[self.group_of[node]][rule] for rule in rules)

    def _cluster(self, cluster: Cluster, pinned: bool | None) -> int:
        saved = _us(cluster.followers) - _us(cluster.followers, self.tp)
        inside = [spread for node in cluster.followers for spread in self._inside(node)]
        variables, new = self._variables_of((*cluster.matrices, *cluster.followers), {"s": sum(inside) - saved})
        state = variables["s"]
        if not new:
            return state
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
        if found.rule == STATISTICS:
            yield statistics_us(self.profile, node, self.tp)
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
        cluster = self.s[self.cluster_of[node]] if node in self.cluster_of else None
        matrices = [user for user in node.users if user in self.group_of and data_of(user) is node]
        names = frozenset(self._reader(user) for user in matrices)
        if carries_gradient(node):
            self._shared["h", None, names] += self._reduce(node)
            self._shared["k", cluster, names] += self._cut(node)
        if cluster is not None:
            whole = any(user not in self.group_of and not self._on_lane(user, node) for user in node.users)
            self._shared["a", cluster, None if whole else names] += self._gather(node)
            if names and not whole and carries_gradient(node):
                self._shared["f", cluster, names] += self._reduce(node) - self._scatter(node)
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
            state = {cluster: 1.0} if isinstance(cluster, int) else {}
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

    def _scatter(self, node: fx.Node) -> float:
        """Summing something of the value's size and keeping a share."""
        return self.profile.reduce_scatter_us("tp", value_bytes(node), self.tp)

    def _cut(self, node: fx.Node) -> float:
        """Gathering something of the value's size in its own dtype: backward of a cut."""
        return self.profile.all_gather_us("tp", value_bytes(node), self.tp)

    def _reduce(self, node: fx.Node) -> float:
        return self.profile.all_reduce_us("tp", value_bytes(node), self.tp)


def _us(nodes: Iterable[fx.Node], ranks: int = 1) -> float:
    """Microseconds of the nodes on a rank that does its share of each."""
    costs = (cost for node in nodes if (cost := facts.get(node, Cost)) is not None)
    return sum(cost.share(ranks).us if ranks > 1 else cost.us for cost in costs)


def _occurrences(pins: Choice) -> set[tuple[str, int]]:
    """The repetitions of blocks that pins touch."""
    pinned = [node for group in pins.rules for node in group.nodes]
    pinned += [node for cluster in pins.states for node in (*cluster.matrices, *cluster.followers)]
    return {(block.name, block.index) for node in pinned if (block := facts.get(node, Block)) is not None}
