"""Cuts the network into pipeline stages.

The problem. Let the parts with keys (see `parts`) be 0..K-1 in topological order, w_i the predicted time, forward and
backward, of everything at position i, and c_i the time to send what crosses the boundary before part i, values and
returning gradients (c_0 = c_K = 0). Choose 0 = k_0 < k_1 < ... < k_S = K so that

    the slowest stage, max over s of  sum of w_i for k_s <= i < k_{s+1}  +  c_{k_s} + c_{k_{s+1}},   is smallest,

and among such cuts one with the smallest sum of the c. A value that a later stage needs is handed on by every stage
between, so c_i counts every value made before i and used at or after i, skips included.

The method. Dynamic programming over (stage, first part of the next stage), exact, O(S K^2) in numpy; the second round
minimises traffic among cuts that reach the optimum of the first. Pinned parts make the ranges that contradict them
infinitely dear; the order of parts follows the pins first, so that any pins without a cycle can be met.
Why not cut by number of layers or parameters: in a spiking network the early, large maps dominate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import fx

from snnpart import facts
from snnpart.bits import packed_bytes, states_of
from snnpart.costs import MachineProfile
from snnpart.errors import PlanError
from snnpart.facts import Cost, Domain, Placement, Replicated, Stage, Value
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.parts import NOWHERE, Part, Parts, find_parts
from snnpart.plan import Plan

_SAME = 1e-9


@dataclass(frozen=True)
class DecideStages:
    """Writes `Stage` on every node; on one that each stage computes for itself (`everywhere`) the first that does.

    `pp` counts the stages of all ranks, `per_rank` of them on each.
    `split_at`: module paths that begin the stages 1, 2, ..., instead of the best cut.
    `pinned` maps module paths (or tensor names) to stages; a path counts for everything below it.
    """

    name: ClassVar[str] = "decide-stages"
    reads: ClassVar[tuple[type, ...]] = (Value, Cost)
    writes: ClassVar[tuple[type, ...]] = (Stage,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    pp: int
    profile: MachineProfile
    tp: int = 1
    pinned: Mapping[str, int] | None = None
    per_rank: int = 1
    split_at: Sequence[str] | None = None

    def run(self, graph: SpikeGraph) -> None:
        """Raises PlanError: fewer parts than stages, or pins that contradict the order of the network."""
        parts = find_parts(graph)
        outside = {path: stage for path, stage in (self.pinned or {}).items() if not 0 <= stage < self.pp}
        if outside:
            raise PlanError(
                f"the pinned stages {outside} are outside 0..{self.pp - 1}", fix="renumber them, or change pp"
            )
        pins = {part: pin for part in parts.keyed if (pin := _pin(self.pinned or {}, part.keys)) is not None}
        _check_count(graph, parts, self.pp, self.per_rank)
        order = _order(parts, pins)
        chosen = _cut(self, graph, parts, pins, order) if self.split_at is None else None
        cuts = chosen if chosen is not None else cuts_at(self.split_at or (), order, self.pp)
        stage_of = {part: int(np.searchsorted(cuts, place, side="right")) for place, part in enumerate(order)}
        write_stages(graph, parts, stage_of, self.pinned or {})


def _check_count(graph: SpikeGraph, parts: Parts, count: int, per_rank: int) -> None:
    most = max(1, parts.positions)
    if count > most:
        asked = (
            f"pp={count}"
            if per_rank == 1
            else f"pp={count // per_rank} with {per_rank} stages a rank is {count} stages"
        )
        raise PlanError(
            f"{asked}, but the network can be cut into at most {most} stages",
            where=graph.name,
            fix=f"choose pp in 1..{most // per_rank or 1}: what shares a tensor or a neuron layer stays together",
        )


def apply_stages(graph: SpikeGraph, plan: Plan) -> None:
    """Write the `Stage` facts that `plan.stages` says.

    Raises:
        PlanError: a part has no stage in the plan, two stages, or an input from a later stage; a stage is empty.
    """
    parts = find_parts(graph)
    stage_of: dict[Part, int] = {}
    for part in parts.keyed:
        stage = 0 if plan.stage_count == 1 else _pin(plan.stages, part.keys)
        if stage is None:
            fix = f"add it to plan.stages (0..{plan.stage_count - 1})"
            raise PlanError("the plan gives it no stage", where=f"'{part.keys[0]}'", fix=fix)
        stage_of[part] = stage
    empty = sorted(set(range(plan.stage_count)) - (set(stage_of.values()) or {0}))
    many = f" with {plan.stages_per_rank} stages a rank" if plan.stages_per_rank > 1 else ""
    if empty:
        raise PlanError(
            f"stages {empty} of pp={plan.pp}{many} hold no layer", fix="give each stage a module, or lower pp"
        )
    write_stages(graph, parts, stage_of, plan.stages)


def write_stages(graph: SpikeGraph, parts: Parts, stage_of: Mapping[Part, int], pinned: Mapping[str, int]) -> None:
    """Put `Stage` on all nodes from the stages of the parts with keys.

    A part without keys runs with the latest of its inputs, later if its own module path is pinned later, and with its
    first user when it has no inputs in any stage.
    """
    found: dict[fx.Node, int] = {}
    for part in parts.parts:
        earliest = max((found[node] for node in part.inputs() if node in found), default=NOWHERE)
        stage = stage_of[part] if part.keys else max(earliest, _own_pin(part, pinned))
        if stage < earliest:
            _refuse_order(part, stage, earliest, found)
        found.update(dict.fromkeys(part.nodes, stage))
    _sink(graph, parts, found)
    for node, stage in found.items():
        facts.put(node, Stage(stage))


def _own_pin(part: Part, pinned: Mapping[str, int]) -> int:
    """The pin of a free node's own module path; results taken out of a tuple stay where the tuple is made."""
    node = part.nodes[0]
    if any(facts.get(n, Value) is None for n in (node, *node.all_input_nodes)):
        return NOWHERE
    return pinned.get(facts.origin(node).module, NOWHERE)


def _refuse_order(part: Part, stage: int, earliest: int, found: Mapping[fx.Node, int]) -> None:
    late = next(node for node in part.inputs() if found.get(node, NOWHERE) == earliest)
    raise PlanError(
        f"it is pinned to stage {stage}, but it needs {facts.place(late)}, which lies in stage {earliest} or later",
        where=f"'{part.keys[0]}'",
        fix=f"pin it to stage {earliest} or later, or what it needs to stage {stage} or earlier",
    )


def _sink(graph: SpikeGraph, parts: Parts, found: dict[fx.Node, int]) -> None:
    """Nodes with no input in any stage go where their first user is; so do those everywhere, for the record."""
    for node in reversed(graph.graph.nodes):
        if found.get(node) == NOWHERE or node in parts.everywhere:
            found[node] = min((found[user] for user in node.users if found.get(user, NOWHERE) >= 0), default=0)


def _pin(pinned: Mapping[str, int], keys: Sequence[str]) -> int | None:
    """The stage that the pins give to a part, by the longest path above each of its keys."""
    stages = {key: stage for key in keys if (stage := lookup(pinned, key)) is not None}
    if len(set(stages.values())) > 1:
        low, high = min(stages, key=stages.__getitem__), max(stages, key=stages.__getitem__)
        raise PlanError(
            f"'{low}' is pinned to stage {stages[low]}, '{high}' to stage {stages[high]}, but they cannot be cut apart",
            where=f"'{keys[0]}'",
            fix="pin both to one stage: they share a tensor, a neuron layer or a time loop",
        )
    return next(iter(stages.values()), None)


def lookup(pinned: Mapping[str, int], name: str) -> int | None:
    """The pin of the longest path that is `name` or above it."""
    while name:
        if name in pinned:
            return pinned[name]
        name = name.rpartition(".")[0]
    return None


def _order(parts: Parts, pins: Mapping[Part, int]) -> list[Part]:
    """A topological order of the parts with keys in which none stands before one that is pinned to an earlier stage.

    The earliest stage of a part is the latest pin among itself and what it depends on; sorting by it is topological.
    """
    found: dict[fx.Node, int] = {}
    earliest: dict[Part, int] = {}
    for part in parts.parts:
        bound = max((found[node] for node in part.inputs() if node in found), default=0)
        if pins.get(part, bound) < bound:
            _refuse_order(part, pins[part], bound, found)
        earliest[part] = pins.get(part, bound)
        found.update(dict.fromkeys(part.nodes, earliest[part]))
    return sorted(parts.keyed, key=lambda part: (earliest[part], part.position))


def _cut(
    options: DecideStages, graph: SpikeGraph, parts: Parts, pins: Mapping[Part, int], order: Sequence[Part]
) -> list[int]:
    """First places (in `order`) of the stages 1.. of the best cut."""
    if options.pp == 1:
        return []
    place = {part.position: i for i, part in enumerate(order)} | {NOWHERE: 0}
    at = _places(parts, place)
    work = _work(at, len(order), options.tp)
    crossing = _crossing(at, len(order), options)
    cuts = best_cut(work, crossing, _barred([pins.get(part) for part in order], options.pp))
    if cuts is None:
        raise PlanError(
            f"no cut into pp={options.pp} stages satisfies the pinned stages",
            where=graph.name,
            fix="pin fewer modules, or leave room for every stage between them",
        )
    return cuts


def cuts_at(paths: Sequence[str], order: Sequence[Part], stages: int) -> list[int]:
    """First places (in `order`) of the stages that begin with these module paths.

    Raises:
        PlanError: a path is not there, cannot be cut from what stands before it, or does not come after the one before;
            or they make another number of stages.
    """
    if len(paths) != stages - 1:
        raise PlanError(
            f"split_at names {len(paths)} modules, which makes {len(paths) + 1} stages instead of {stages}",
            fix=f"name the {stages - 1} modules that begin the stages 1 to {stages - 1}"
            if stages > 1
            else "leave it out",
        )
    cuts: list[int] = []
    for path in paths:
        place = _first_place(path, order)
        _check_cut(path, order, place, cuts[-1] if cuts else 0)
        cuts.append(place)
    return cuts


def _is_below(key: str, path: str) -> bool:
    return key == path or key.startswith(f"{path}.")


def _first_place(path: str, order: Sequence[Part]) -> int:
    """Where the first part stands that holds something of the module."""
    found = next((i for i, part in enumerate(order) if any(_is_below(key, path) for key in part.keys)), None)
    if found is None:
        owners = list(dict.fromkeys(key.split(".")[0] for part in order for key in part.keys))
        raise PlanError(
            "split_at names it, but no tensor or neuron layer that the network uses lies there",
            where=f"'{path}'",
            fix="name the module where the stage begins",
            choices=owners[:20],
        )
    return found


def _check_cut(path: str, order: Sequence[Part], place: int, before: int) -> None:
    """Refuse a cut in the midst of a part, at the start, or not after the cut before."""
    joined = [key for key in order[place].keys if not _is_below(key, path)]
    if joined:
        raise PlanError(
            f"no stage can begin there: it cannot be cut from '{joined[0]}'",
            where=f"'{path}'",
            fix="they share a tensor or a neuron layer, or lie on one loop over time; begin the stage elsewhere",
        )
    if place <= before:
        what = (
            "it is where the network begins" if place == 0 else "it does not come after the start of the stage before"
        )
        raise PlanError(f"no stage can begin there: {what}", where=f"'{path}'", fix="name the modules as they run")


def _places(parts: Parts, place: Mapping[int, int]) -> dict[fx.Node, int]:
    """Place of every node in the order: its own for a part with keys, else the latest of its inputs."""
    found: dict[fx.Node, int] = {}
    for part in parts.parts:
        latest = max((found[node] for node in part.inputs() if node in found), default=0)
        found.update(dict.fromkeys(part.nodes, place[part.position] if part.keys else latest))
    return found


def _work(at: Mapping[fx.Node, int], count: int, tp: int) -> np.ndarray:
    """Microseconds of forward and backward at each position."""
    work = np.zeros(count)
    for node, position in at.items():
        cost = facts.get(node, Cost)
        work[position] += cost.us / (tp if _is_split(node) else 1) if cost else 0.0
    return work


def _is_split(node: fx.Node) -> bool:
    placement = facts.get(node, Placement)
    return placement is not None and not (
        isinstance(placement.output, Replicated) and all(isinstance(spread, Replicated) for spread in placement.inputs)
    )


def _crossing(at: Mapping[fx.Node, int], count: int, options: DecideStages) -> np.ndarray:
    """Microseconds to send what crosses the boundary before each position, forward and backward."""
    change = np.zeros((count + 1, 2))
    for node, position in at.items():
        value = facts.get(node, Value)
        last = max(
            (at.get(user, count - 1 if user.op == "output" else position) for user in node.users), default=position
        )
        if value is not None and last > position and node.op != "get_attr":
            sizes = np.array([_wire_bytes(node, value), value.bytes if value.requires_grad else 0]) / (
                options.tp if _is_split(node) else 1
            )
            change[position + 1] += sizes
            change[last + 1] -= sizes
    alive = np.cumsum(change, axis=0)[:count]
    return np.array([_send(options.profile, forward) + _send(options.profile, back) for forward, back in alive])


def _wire_bytes(node: fx.Node, value: Value) -> int:
    """Bytes that cross a boundary forward: bits where the value has few states."""
    states = states_of(facts.get(node, Domain), value.dtype)
    return value.bytes if states is None else packed_bytes(value.numel, states[1])


def _send(profile: MachineProfile, size: float) -> float:
    return profile.send_us("pp", float(size)) if size > 0.5 else 0.0


def _barred(pins: Sequence[int | None], stages: int) -> np.ndarray:
    """barred[s, i]: how many of the parts before i are pinned to a stage other than s."""
    barred = np.zeros((stages, len(pins) + 1))
    for i, pin in enumerate(pins):
        barred[:, i + 1] = barred[:, i] + [pin is not None and pin != stage for stage in range(stages)]
    return barred


def best_cut(work: np.ndarray, crossing: np.ndarray, barred: np.ndarray) -> list[int] | None:
    """The cut described at the top of this file: first positions of stages 1.., or None when the pins allow none.

    `work` and `crossing` have one entry a part, in microseconds; `barred[s, i]` counts parts before i that stage s may
    not hold.
    """
    stages, count = barred.shape[0], len(work)
    total = np.concatenate([[0.0], np.cumsum(work)])
    edge = np.concatenate([[0.0], crossing[1:], [0.0]])
    span = total[None, :] - total[:, None] + edge[:, None] + edge[None, :]
    span[np.tril_indices(count + 1)] = np.inf
    allowed = [np.where(row[None, :] > row[:, None], np.inf, span) for row in barred]
    slowest, _ = _stepwise(allowed, lambda best, cost: np.maximum(best[:, None], cost))
    limit = slowest * (1 + _SAME)
    if not np.isfinite(limit):
        return None
    traffic = [np.where(cost <= limit, np.broadcast_to(edge, cost.shape), np.inf) for cost in allowed]
    _, cuts = _stepwise(traffic, lambda best, cost: best[:, None] + cost)
    return cuts[: stages - 1]


def _stepwise(
    costs: Sequence[np.ndarray], join: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, list[int]]:
    """Best value of stages that end at the last part, and where each stage ends."""
    count = costs[0].shape[0] - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices = []
    for cost in costs:
        reached = join(best, cost)
        choices.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    ends = [count]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(best[count]), ends[::-1][1:]
