"""Cuts the network into pipeline stages: which parts may be cut apart say `parts`, where it is best `cut`.

Pinned parts bar the ranges that contradict them; the order of parts follows the pins first, so that any pins without a
cycle can be met. Why not cut by number of layers or parameters: in a spiking network the early, large maps dominate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from torch import fx

from snnpart import facts, footprint
from snnpart.costs import MachineProfile
from snnpart.errors import PlanError
from snnpart.facts import Cost, Stage, Value
from snnpart.graph import SpikeGraph
from snnpart.orders import Schedule, in_flight, make_schedule
from snnpart.passes.decide.copies import best_copies
from snnpart.passes.decide.cut import barred, best_cut, least_bytes, slowest_us
from snnpart.passes.decide.memory import mb
from snnpart.passes.decide.parts import NOWHERE, Part, Parts, find_parts
from snnpart.passes.decide.places import Places
from snnpart.passes.decide.shared_ranks import SharedRanks, best_shared_cut
from snnpart.passes.decide.split_at import cuts_at
from snnpart.passes.decide.tied import separate
from snnpart.plan import Plan


@dataclass(frozen=True)
class DecideStages:
    """Writes `Stage` on every node; on one that each stage computes for itself (`everywhere`) the first that does.

    `pp` counts the stages of all ranks, `per_rank` of them on each.
    `split_at`: module paths that begin the stages 1, 2, ..., instead of the best cut.
    `pinned` maps module paths (or tensor names) to stages; a path counts for everything below it.
    `memory`: bytes that a rank may hold under `schedule` with so many `microbatches` (0: no limit).
    `tied`: the parameters that several stages may hold (see `tied`); None: those for which it pays (`best_copies`).
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
    schedule: str = "gpipe"
    microbatches: int = 1
    memory: int = 0
    tied: Sequence[str] | None = None

    def run(self, graph: SpikeGraph) -> None:
        """Raises PlanError: fewer parts than stages, pins that contradict the order of the network, or no cut whose
        ranks hold as little as `memory`."""
        apart = best_copies(self, graph) if self.tied is None and self.pp > 1 else tuple(self.tied or ())
        separate(graph, apart)
        parts, stage_of, _ = self.assign(graph)
        write_stages(graph, parts, stage_of, {**(self.pinned or {}), **_begun(self.split_at or (), graph, stage_of)})

    def assign(self, graph: SpikeGraph) -> tuple[Parts, dict[Part, int], float]:
        """The parts of the graph, the stage of each one with keys, and the time of the slowest stage (us).

        Raises:
            PlanError: as `run`.
        """
        parts = find_parts(graph)
        outside = {path: stage for path, stage in (self.pinned or {}).items() if not 0 <= stage < self.pp}
        if outside:
            raise PlanError(
                f"the pinned stages {outside} are outside 0..{self.pp - 1}", fix="renumber them, or change pp"
            )
        pins = {part: pin for part in parts.keyed if (pin := _pin(self.pinned or {}, part.keys)) is not None}
        _check_count(graph, parts, self.pp, self.per_rank)
        order = _order(parts, pins)
        places = Places.of(graph, parts, order, self.tp)
        chosen = _cut(self, places, [pins.get(part) for part in order]) if self.split_at is None else None
        cuts = chosen if chosen is not None else cuts_at(self.split_at or (), order, self.pp)
        stage_of = {part: int(np.searchsorted(cuts, place, side="right")) for place, part in enumerate(order)}
        slowest = slowest_us(places.work(), places.crossing(self.profile), cuts) if cuts else float(places.work().sum())
        return parts, stage_of, slowest

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.pp // self.per_rank


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
    """Write the `Stage` facts that `plan.stages` says; copies of the plan's tied parameters get reads of their own.

    Raises:
        PlanError: a part has no stage in the plan, two stages, or an input from a later stage; a stage is empty.
    """
    separate(graph, plan.tied)
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


def _begun(split_at: Sequence[str], graph: SpikeGraph, stage_of: Mapping[Part, int]) -> dict[str, int]:
    """Pins of the modules that run where the named ones begin, no later than what reads them: a stage begins with the
    first operation of its module, also with one without a tensor of its own."""
    begins = {path: stage for stage, path in enumerate(split_at, 1)}
    latest = {node: stage for part, stage in stage_of.items() for node in part.nodes}
    pins: dict[str, int] = {}
    for node in reversed(graph.graph.nodes) if begins else ():
        latest.setdefault(node, min((latest[user] for user in node.users), default=len(split_at)))
        path = facts.origin(node).module
        pin = lookup(begins, path)
        if pin is not None:
            pins[path] = min(pin, latest[node], pins.get(path, pin))
    return pins


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


def _cut(options: DecideStages, places: Places, pins: Sequence[int | None]) -> list[int]:
    """First places of the stages 1.. of the best cut."""
    if options.pp == 1:
        return []
    work, crossing = places.work(), places.crossing(options.profile)
    bars = barred(pins, options.pp)
    if not options.memory:
        cuts = best_cut(work, crossing, bars)
    elif options.per_rank == 1:
        cuts = best_cut(work, crossing, bars, _bytes(options, places), options.memory)
    else:
        held, ranks = places.held(), _shared(options, places.graph.batch)
        cuts = best_shared_cut(work, crossing, pins, options.pp, held, ranks, options.memory)
    if cuts is None:
        raise _refusal(options, places, bars)
    return cuts


def _bytes(options: DecideStages, places: Places) -> list[np.ndarray]:
    """For each stage, one on a rank, the bytes of every range of places."""
    schedule, part = _schedule(options), footprint.largest_part(places.graph.batch, options.microbatches)
    counts = [in_flight(actions) for _, actions in sorted(schedule.items())]
    return places.held().of_stages([min(1.0, count * part) for count in counts])


def _schedule(options: DecideStages) -> Schedule:
    return make_schedule(options.schedule, options.ranks, options.microbatches, options.per_rank)


def _shared(options: DecideStages, batch: int) -> SharedRanks:
    moments = [footprint.held_together(actions) for _, actions in sorted(_schedule(options).items())]
    return SharedRanks(moments, footprint.largest_part(batch, options.microbatches))


def _refusal(options: DecideStages, places: Places, bars: np.ndarray) -> PlanError:
    """No cut satisfies the pins, or none the bound: then what is possible, and what would help."""
    if best_cut(places.work(), np.zeros(places.count), bars) is None:
        return PlanError(
            f"no cut into pp={options.pp} stages satisfies the pinned stages",
            where=places.graph.name,
            fix="pin fewer modules, or leave room for every stage between them",
        )
    least = "" if options.per_rank > 1 else f"a rank holds at least {mb(least_bytes(bars, _bytes(options, places)))}"
    ways = [text for text, other in _others(options, places) if _fits(other, places)]
    return PlanError(
        f"{least or 'every cut has a rank that holds more'} with pp={options.ranks}, schedule={options.schedule!r} and "
        f"{options.microbatches} microbatches; memory= allows {mb(options.memory)}",
        where=f"network '{places.graph.name}'",
        fix=f"take {' or '.join(ways)}" if ways else "allow more, give fewer samples, or raise tp",
    )


def _others(options: DecideStages, places: Places) -> list[tuple[str, DecideStages]]:
    """Plans that hold less: one stage a rank under 1F1B, more microbatches, more stages."""
    pp, batch = options.ranks, places.graph.batch
    base = replace(options, pp=pp, per_rank=1, schedule="1f1b", microbatches=max(options.microbatches, pp), pinned=None)
    found = [] if options.schedule == "1f1b" else [(f'schedule="1f1b", microbatches={base.microbatches}', base)]
    if batch > base.microbatches:
        found.append((f'schedule="1f1b", microbatches={batch}', replace(base, microbatches=batch)))
    for more in (2 * pp, 4 * pp):
        if more <= places.count:
            found.append((f"pp={more}", replace(base, pp=more, microbatches=max(base.microbatches, more))))
    return found


def _fits(options: DecideStages, places: Places) -> bool:
    free = np.zeros((options.pp, places.count + 1))
    return least_bytes(free, _bytes(options, places)) <= options.memory
