"""Why a layer lies as it does: for each rule the best plan with it, what that plan costs, or why there is none.

The alternatives are whole plans: the other layers are decided anew around the rule, as they were for the chosen plan
(the user's constraints kept), since a rule that costs more at its layer may save more at the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from torch import fx

from snnpart import facts, ops
from snnpart.costs import MachineProfile
from snnpart.errors import PlanError
from snnpart.explain import Alternative, Why
from snnpart.facts import Cost
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.constraints import WRITTEN_OUT
from snnpart.passes.decide.lanes import REPLICATE, Lanes, find_lanes, path_of
from snnpart.passes.decide.memory import OverMemory
from snnpart.passes.decide.placement import Objective, apply_shards, pinned_choice, write_placements
from snnpart.passes.decide.placement_program import solve
from snnpart.passes.rewrite.shard_channels import shard_for_rank
from snnpart.passes.rewrite.unfold_feedback import matrices_inside
from snnpart.plan import Plan

_WRITTEN_OUT = f'shard="max" writes out one of at most {WRITTEN_OUT} steps, with a collective a step'


def why(
    graph: SpikeGraph,
    plan: Plan,
    path: str,
    *,
    profile: MachineProfile,
    constraints: Mapping[str, str] | None = None,
    objective: Objective = "max",
) -> Why:
    """The alternatives of the layer `path` in an analysed graph that was decided as `plan`.

    Raises:
        PlanError: no operation has this path.
    """
    lanes = find_lanes(graph, plan.tp) if plan.tp > 1 else Lanes({}, {}, (), (), {}, 1)
    rules, reasons = _rules(graph, lanes, path)
    work = graph.copy()
    apply_shards(work, plan)
    chosen = _Costs.of(work, plan.tp, profile)
    taken = plan.shards.get(path, REPLICATE)
    asked = dict(constraints or {})
    found = []
    for rule in rules:
        if rule == taken:
            found.append(_chosen(rule, chosen, asked.get(path)))
        else:
            other = _best_with(work, {**asked, path: rule}, plan, profile, objective)
            found.append(_other(rule, other, chosen, objective, asked.get(path)))
    missing = tuple(Alternative(rule, None, 0.0, 0, f"unavailable: {reason}") for rule, reason in reasons.items())
    return Why(path, taken, (*found, *missing), _forbids(objective, taken, rules))


def _forbids(objective: Objective, taken: str, rules: tuple[str, ...]) -> str:
    if objective == "max" and taken != REPLICATE and len(rules) > 1:
        return 'shard="max" shards every layer that can be; "time" would take the fastest'
    return ""


def _rules(graph: SpikeGraph, lanes: Lanes, path: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Rules that the layer can have, and reasons for those it cannot."""
    group = next((group for group in lanes.groups if group.path == path), None)
    if group is not None:
        return group.rules, {rule: text for rule, text in group.reasons.items() if rule not in group.rows}
    if any(path in matrices_inside(node) for node in graph.graph.nodes):
        return (REPLICATE,), {"column": f"it is inside a time loop; {_WRITTEN_OUT}"}
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call") and path_of(node) == path]
    if not nodes:
        raise _unknown(graph, path)
    rules = tuple(dict.fromkeys(lanes.rows[node].rule for node in nodes if node in lanes.rows))
    reason = next((lanes.reasons[node] for node in nodes if node in lanes.reasons), "")
    if not rules and not reason:
        reason = "one rank holds every channel" if lanes.tp == 1 else "its input is never sharded"
    return (*rules, REPLICATE), {"shard": reason} if reason else {}


def _unknown(graph: SpikeGraph, path: str) -> PlanError:
    paths = [found for found in dict.fromkeys(path_of(node) for node in graph.graph.nodes) if found]
    near = get_close_matches(path, paths, n=5, cutoff=0.4) or paths[:8]
    return PlanError(f"no operation of the network has the path '{path}'", where=graph.name, choices=near)


class _Costs:
    """Predicted microseconds of a step on tp rank 0: all of it, its collectives, and how many they are."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        costs = [(node, cost) for node in nodes if (cost := facts.get(node, Cost)) is not None]
        moves = [cost.us for node, cost in costs if node.target in ops.COLLECTIVES]
        self.total, self.moving, self.count = sum(cost.us for _, cost in costs), sum(moves), len(moves)

    @classmethod
    def of(cls, graph: SpikeGraph, tp: int, profile: MachineProfile) -> _Costs:
        return cls(list(shard_for_rank(graph, tp, 0, profile).nodes))


def _chosen(rule: str, costs: _Costs, asked: str | None) -> Alternative:
    text = "chosen" if asked is None else f"chosen: shard= asks for '{asked}'"
    return Alternative(rule, costs.total, costs.moving, costs.count, text)


def _best_with(
    graph: SpikeGraph, pins: Mapping[str, str], plan: Plan, profile: MachineProfile, objective: Objective
) -> _Costs | str:
    """What the best plan under the pins costs; the reason when there is none."""
    work = graph.copy()
    lanes = find_lanes(work, plan.tp)
    memory = plan.memory if plan.memory and plan.pp == 1 else None
    try:
        pinned = pinned_choice(work, lanes, pins)
        choice = solve(work, lanes, plan.tp, profile, pinned, shard_all=objective == "max", memory=memory)
    except PlanError as error:
        return error.what
    except OverMemory as over:
        return f"a rank would hold {over}, more than memory={plan.memory}"
    write_placements(work, lanes, choice)
    return _Costs.of(work, plan.tp, profile)


def _other(rule: str, costs: _Costs | str, chosen: _Costs, objective: Objective, asked: str | None) -> Alternative:
    if isinstance(costs, str):
        return Alternative(rule, None, 0.0, 0, f"unavailable: {costs}")
    return Alternative(rule, costs.total, costs.moving, costs.count, _verdict(costs, chosen, rule, objective, asked))


def _verdict(costs: _Costs, chosen: _Costs, rule: str, objective: Objective, asked: str | None) -> str:
    slower = costs.total - chosen.total
    moved = costs.moving - chosen.moving
    parts = f"collectives {moved:+.1f} us ({costs.count} instead of {chosen.count}), computing {slower - moved:+.1f} us"
    if asked is not None:
        return f"not taken: shard= asks for '{asked}'; {slower:+.1f} us: {parts}"
    if slower < 0 and rule == REPLICATE and objective == "max":
        return f'not taken: shard="max" shards what can be, though it would save {-slower:.1f} us: {parts}'
    return f"lost by {slower:.1f} us: {parts}"
