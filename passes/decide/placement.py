"""Decides which layers are sharded over the tp ranks, by an integer program.

Variables, with g a group of matrix operations and c a cluster of values (see `lanes`):

    y[g, rule] in {0, 1}    g takes the rule                  sum over rules of y[g, rule] = 1
    s[c] in {0, 1}          the values of c are on their lane

Objective: predicted time of one step on a rank, forward and backward, with n ranks,

    sum_g  us(g) y[g, replicate] + us_n(g) (1 - y[g, replicate])  +  sum_c us(c) (1 - s[c]) + us_n(c) s[c]
  + sum_g  y[g, row] all_reduce(result)                                                 the sum over input channels
  + sum_g  y[g, scatter] (reduce_scatter(result) + gather(its gradient))                each rank keeps its share
  + sum_v  h[v] all_reduce(v)        h[v] >= y[g, column]  for g that read v            gradient of a shared input
  + sum_v  a[v] gather_bits(v)       a[v] >= s[c(v)] - z[g], a[v] = s[c(v)] if another operation needs v whole
  + sum_v  k[v] gather(v)            k[v] >= z[g] - s[c(v)]                             gradient of a value cut for g
  + sum_g  gather(result) (p[g] + q[g])         p[g] >= d[g] - s[c(g)],  q[g] >= s[c(g)] - d[g]
  - sum_v  f[v] (all_reduce(v) - reduce_scatter(v))     a gather and the sum of its gradient are one:
                                     f[v] <= s[c(v)], f[v] <= y[g, column] + z[g] for all g that read v,
                                     f[v] <= sum of y[g, column]; 0 if another operation needs v whole

with us_n the time of an n-th of the work, whose kernels take as long to launch; d[g] = y[g, column] + y[g, scatter], by
which g deals out its result; and z[g] = y[g, row] + y[g, scatter], by which it reads its share of the input.
gather_bits is the faster of a gather in the value's dtype and one of its bits with the kernels that pack them
(`snnpart.bits`). In a group of an embedding and a head tied to it, the head's rules are those that cut the weight as
the embedding's do.

A cluster that no pin fixes is sharded exactly when one of its producers is: s[c] >= d[g] for g in c and s[c] <= sum of
these. So the rules of the matrix operations determine everything, and a plan need name only them. h, a, k, p, q and f
are continuous: at an optimum they equal the bound. Values with the same cluster and readers share one variable, so the
program does not grow with T.

`memory` adds one constraint, that a rank holds at most so many bytes; `memory` (the module) states it.

Repeated blocks are decided each for itself as long as that is quick (`MANY` groups), since what stands before or behind
a block may make another choice best there: a chain alternates between column and row whatever its blocks are. In larger
networks the repetitions of a block share their variables, so that they are solved once.

`objective="time"` minimises this; `"max"` first shards every matrix operation that has a row for it, then minimises the
time. Whoever asks for tp=2 usually does so for memory, so "max" is the default; on links as slow as a CPU's, "time"
often answers that one rank is best. HiGHS (scipy's `milp`) solves both exactly. Why not a recipe (column, row, column,
...): residual streams and concatenations make neighbours of more than two layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.effects import writes_buffer
from snnpart.errors import PlanError
from snnpart.facts import Cost, Placement, Sharded, Spread, Value
from snnpart.graph import SpikeGraph, output_node
from snnpart.passes.decide.lanes import REPLICATE, Cluster, Group, Lanes, find_lanes, path_of
from snnpart.passes.decide.memory import OverMemory, mb
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.placement_program import Choice, least_bytes, solve
from snnpart.passes.decide.rules import R, Row, replicate
from snnpart.passes.decide.weights import made_of_tensors, rows_of_weights
from snnpart.plan import Plan

Objective = Literal["max", "time"]


@dataclass(frozen=True)
class DecidePlacement:
    """Writes `Placement` on every node. `pinned` maps module paths to rules."""

    name: ClassVar[str] = "decide-placement"
    reads: ClassVar[tuple[type, ...]] = (Value, Cost)
    writes: ClassVar[tuple[type, ...]] = (Placement,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "reassociates"

    tp: int
    profile: MachineProfile
    pinned: Mapping[str, str] | None = None
    objective: Objective = "max"
    memory: float | None = None

    def run(self, graph: SpikeGraph) -> None:
        """Raises PlanError: a pinned path does not exist, or cannot have its rule, or a rank would hold more than
        `memory` bytes whatever is sharded."""
        if self.tp == 1 and self.memory is None:
            return _replicate_all(graph)
        lanes = find_lanes(graph, self.tp) if self.tp > 1 else Lanes({}, {}, (), (), {}, 1)
        pins = pinned_choice(graph, lanes, self.pinned or {})
        write_placements(graph, lanes, self._solve(graph, lanes, pins))

    def _solve(self, graph: SpikeGraph, lanes: Lanes, pins: Choice) -> Choice:
        shard_all = self.objective == "max"
        try:
            return solve(graph, lanes, self.tp, self.profile, pins, shard_all=shard_all, memory=self.memory)
        except OverMemory as over:
            assert self.memory is not None  # the bound that was broken
            raise self._refusal(graph, over) from over

    def _refusal(self, graph: SpikeGraph, over: OverMemory) -> PlanError:
        """What is possible, and what would help: more ranks, or fewer samples."""
        assert self.memory is not None  # the bound that was broken
        ways = []
        for tp in (2 * self.tp, 4 * self.tp, 8 * self.tp):
            least = sum(least_bytes(graph, find_lanes(graph, tp), tp, self.profile, Choice({}, {})))
            if least <= self.memory:
                ways.append(f"tp={tp} (at least {mb(least)})")
                break
        samples = int(graph.batch * (self.memory - over.tensors) / over.saved) if over.saved else 0
        if samples > 0:
            ways.append(f"a batch of {samples}")
        return PlanError(
            f"a rank holds at least {mb(over.tensors + over.saved)} with tp={self.tp}: {mb(over.tensors)} of tensors "
            f"with gradients and optimizer moments, {mb(over.saved)} saved for backward of {graph.batch} samples; "
            f"memory= allows {mb(self.memory)}",
            where=f"network '{graph.name}'",
            fix="try " + " or ".join(ways) if ways else "allow more, or cut the network into pipeline stages",
        )


def apply_shards(graph: SpikeGraph, plan: Plan) -> None:
    """Write the `Placement` facts that `plan.shards` says: what it does not name is replicated or follows.

    Raises:
        PlanError: a path does not exist, or cannot have its rule; the message lists the rules it can have.
    """
    if plan.tp == 1:
        return _replicate_all(graph)
    lanes = find_lanes(graph, plan.tp)
    pins = pinned_choice(graph, lanes, plan.shards)
    rules = {group: pins.rules.get(group, REPLICATE) for group in lanes.groups}
    group_of = lanes.group_of()
    states = {
        cluster: pins.states.get(cluster, any(_deals(group_of[node], node, rules) for node in cluster.matrices))
        for cluster in lanes.clusters
    }
    write_placements(graph, lanes, Choice(rules, states))


def _deals(group: Group, node: fx.Node, rules: Mapping[Group, str]) -> bool:
    """Whether the group's rule deals out the channels of the node's result."""
    return rules[group] in group.dealing(node)


def _replicate_all(graph: SpikeGraph) -> None:
    for node in graph.graph.nodes:
        facts.put(node, _placement(replicate(node)))


def _placement(row: Row) -> Placement:
    return Placement(row.rule, row.output, row.inputs, row.partial)


def shards_by_path(graph: SpikeGraph) -> dict[str, str]:
    """The rules of convolutions, linears, norms and neuron layers under their module paths."""
    found: dict[str, str] = {}
    weights = made_of_tensors(graph.graph)
    for node in graph.graph.nodes:
        placement = facts.get(node, Placement) if node not in weights else None
        owns = node.op == "call_module" or any(is_tensor_read(n) for n in node.all_input_nodes)
        path = path_of(node)
        if placement is not None and owns and node.op != "output" and placement.rule != REPLICATE and path:
            found[path] = placement.rule
    return dict(sorted(found.items()))


def pinned_choice(graph: SpikeGraph, lanes: Lanes, pinned: Mapping[str, str]) -> Choice:
    """Rules of groups and states of clusters that the pins (module path -> rule) fix.

    Raises:
        PlanError: a path does not exist, or cannot have its rule.
    """
    groups = {path_of(node): group for group in lanes.groups for node in group.nodes}
    followers: dict[str, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module") and path_of(node) not in groups:
            followers.setdefault(path_of(node), []).append(node)
    cluster_of = lanes.cluster_of()
    choice = Choice({}, {})
    for path, rule in pinned.items():
        if path in groups:
            choice.rules[groups[path]] = _checked_rule(path, rule, groups[path])
        elif path in followers:
            _pin_followers(path, rule, followers[path], lanes, cluster_of, choice.states)
        else:
            raise PlanError(
                f"plan.shards names '{path}', which no operation of the network has",
                where=graph.name,
                fix="use the path of a convolution, linear, norm or neuron layer",
            )
    return choice


def _checked_rule(path: str, rule: str, group: Group) -> str:
    if rule not in group.rules:
        reason = group.reasons.get(rule)
        raise PlanError(
            f"it cannot be sharded by '{rule}'" + (f": {reason}" if reason else ""),
            where=f"'{path}'",
            fix=_whole(path),
            choices=group.rules,
        )
    return rule


def _whole(path: str) -> str:
    return f'ask for nothing, or keep the layer whole: shard={{"{path}": "{REPLICATE}"}}'


def _pin_followers(
    path: str,
    rule: str,
    nodes: list[fx.Node],
    lanes: Lanes,
    cluster_of: Mapping[fx.Node, Cluster],
    states: dict[Cluster, bool],
) -> None:
    rows = [lanes.rows[node] for node in nodes if node in lanes.rows]
    valid = (*dict.fromkeys(found.rule for found in rows), REPLICATE)
    if rule not in valid:
        reason = next((lanes.reasons[node] for node in nodes if node in lanes.reasons), "its input is never sharded")
        what = f"it cannot be sharded by '{rule}': {reason}"
        raise PlanError(what, where=f"'{path}'", fix=_whole(path), choices=valid)
    for node in nodes:
        cluster = cluster_of.get(node)
        if cluster is not None and states.setdefault(cluster, rule != REPLICATE) != (rule != REPLICATE):
            raise PlanError(
                f"it is pinned to '{rule}', but what it is added to or concatenated with is pinned otherwise",
                where=f"'{path}'",
                fix="pin both alike",
            )


def write_placements(graph: SpikeGraph, lanes: Lanes, choice: Choice) -> None:
    """Put `Placement` on every node, and notes on what stays replicated although its input is sharded."""
    cluster_of = lanes.cluster_of()
    chosen: dict[fx.Node, Row] = {}
    for group, rule in choice.rules.items():
        chosen.update(zip(group.nodes, group.rows.get(rule, ())))
    for node, found in lanes.rows.items():
        if choice.states[cluster_of[node]]:
            chosen[node] = found
    chosen.update(rows_of_weights(graph, chosen, lanes.tp))
    for node in graph.graph.nodes:
        facts.put(node, _placement(chosen.get(node) or replicate(node)))
    _place_tensors(graph)
    _note_replicated(graph, lanes, choice)


def _place_tensors(graph: SpikeGraph) -> None:
    """A tensor is sliced when everything that reads it needs the same slices, or when what writes it does: running
    statistics that other operations read are gathered for those, for a write to a copy would be lost."""
    wanted: dict[str, set[Spread]] = {}
    written: dict[str, set[Spread]] = {}
    reads = [node for node in graph.graph.nodes if is_tensor_read(node)]
    for read in reads:
        for user in read.users:
            inputs = dict(zip(user.all_input_nodes, facts.need(user, Placement).inputs))
            wanted.setdefault(str(read.target), set()).add(inputs[read])
            if writes_buffer(user) and not facts.need(read, Value).requires_grad:
                written.setdefault(str(read.target), set()).add(inputs[read])
    for read in reads:
        spreads = written.get(str(read.target)) or wanted.get(str(read.target), {R})
        spread = next(iter(spreads))
        if len(spreads) == 1 and isinstance(spread, Sharded):
            facts.put(read, Placement("slice", spread))


def _note_replicated(graph: SpikeGraph, lanes: Lanes, choice: Choice) -> None:
    cluster_of = lanes.cluster_of()
    on_lane = {node for node, cluster in cluster_of.items() if choice.states[cluster]}
    end = output_node(graph.graph)
    for node, reason in lanes.reasons.items():
        if on_lane.intersection(node.all_input_nodes) and node is not end:
            graph.notes[f"replicated {path_of(node) or node.name}"] = f"{facts.place(node)}: {reason}"
    for group, rule in choice.rules.items():
        if rule == REPLICATE:
            reason = "; ".join(f"{name}: {why}" for name, why in group.reasons.items()) or "the plan replicates it"
            graph.notes[f"replicated {group.path}"] = f"{facts.place(group.nodes[0])}: {reason}"
