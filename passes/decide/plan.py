"""Makes the plan: placement, then stages, written as data under the user's names.

A plan in which every decision is pinned is given back unchanged in meaning; what it leaves open is decided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from snnpart import facts, schedules
from snnpart.costs import MachineProfile
from snnpart.facts import Stage
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.constraints import pins_for
from snnpart.passes.decide.parts import find_parts
from snnpart.passes.decide.placement import DecidePlacement, Objective, shards_by_path
from snnpart.passes.decide.stages import DecideStages, lookup
from snnpart.passes.decide.tied import MADE_BY, copied_parameters
from snnpart.passes.decide.units import Units, decide_units
from snnpart.plan import Plan


def decide(
    graph: SpikeGraph,
    *,
    tp: int,
    pp: int,
    microbatches: int = 1,
    schedule: str = "",
    stages_per_rank: int = 0,
    split_at: Sequence[str] | None = None,
    memory: int = 0,
    dp: str = "ddp",
    pinned: Plan | None = None,
    profile: MachineProfile,
    objective: Objective = "max",
    shard: Mapping[str, str] | None = None,
    units: int | None = None,
    reshard: bool | None = None,
) -> Plan:
    """The plan for an analysed graph. `pinned` fixes what its `shards` and `stages` name; other fields are not read.
    `memory`: bytes that one rank may take (0: no limit). `units`, `reshard`: see `decide_units`. `shard` are the user's
    constraints (see `constraints`); `pinned` goes before them.

    The result depends on the arguments alone, never on the rank or on measurements, so that every rank can make it.

    Raises:
        PlanError: no plan satisfies the request.
    """
    schedule = schedule or schedules.default(pp, microbatches)
    per_rank = schedules.stages_per_rank(schedule, pp, stages_per_rank)
    work = graph.copy()
    pins = {**pins_for(graph, tp, shard or {}), **(pinned.shards if pinned else {})}
    whole = memory if pp == 1 and memory else None  # with stages the cut keeps the bound
    DecidePlacement(tp, profile, pins, objective, whole).run(work)
    DecideStages(
        pp=pp * per_rank, profile=profile, tp=tp, pinned=pinned.stages if pinned else None, per_rank=per_rank,
        split_at=None if pinned else split_at, schedule=schedule, microbatches=microbatches, memory=memory,
        tied=pinned.tied if pinned else None,
    ).run(work)  # fmt: skip
    if MADE_BY in work.notes:
        graph.notes[MADE_BY] = work.notes[MADE_BY]
    gathered = Units(pinned.units, pinned.reshard) if pinned else Units({}, False)
    if dp == "fsdp2" and not gathered.units:
        gathered = decide_units(
            work, profile, tp=tp, microbatches=microbatches, memory=memory, count=units, reshard=reshard
        )
    return Plan(
        tp=tp,
        pp=pp,
        dp=dp,
        units=dict(gathered.units),
        reshard=gathered.reshard,
        schedule=schedule,
        microbatches=microbatches,
        stages_per_rank=per_rank,
        memory=memory,
        tied=copied_parameters(work),
        shards=shards_by_path(work),
        stages=_stages_by_path(work, pinned.stages if pinned else {}),
    )


def _stages_by_path(graph: SpikeGraph, pinned: Mapping[str, int]) -> dict[str, int]:
    """Stages under module paths, as `Plan.stages` describes; by tensor name where a module's tensors lie apart, or
    later than its operations."""
    owners, operations = _owners(graph, pinned), _paths_of_operations(graph)
    stages: dict[str, int] = {}
    for owner, names in owners.items():
        first = min(names.values())
        # a path moves the module's operations too: one whose buffers are written later than it computes has no stage
        together = set(names.values()) == {first} and first <= min(operations.get(owner, {first}))
        stages.update({owner: first} if owner and together else names)
    for path, found in operations.items():
        if path and len(found) == 1 and path not in stages:
            stages[path] = found.pop()
    return dict(sorted(stages.items()))


def _owners(graph: SpikeGraph, pinned: Mapping[str, int]) -> Mapping[str, dict[str, int]]:
    """For each module path its own tensors and leaf with their stages.

    Unused tensors stay where they are pinned (another mode of the network may use them), or follow the path above them.
    """
    stage_of: dict[str, int] = {}
    for part in find_parts(graph).keyed:
        stage_of.update(dict.fromkeys(part.keys, facts.need(part.nodes[0], Stage).index))
    owners: dict[str, dict[str, int]] = defaultdict(dict)
    in_leaves = graph.tied_leaves()
    for key, stage in stage_of.items():
        owners[key if key in graph.leaves else key.rpartition(".")[0]][key] = stage
    for name in graph.tensors:
        owner = name.rpartition(".")[0]
        if name in stage_of or name in in_leaves:
            continue
        pin = lookup(pinned, name)
        if pin is not None or owner not in owners:
            owners[owner][name] = _nearest(stage_of, owner) if pin is None else pin
    return owners


def _nearest(stage_of: Mapping[str, int], path: str) -> int:
    """The first stage of what lies under `path` or, failing that, under the nearest path above it; 0 at the top."""
    while path:
        inside = [stage for key, stage in stage_of.items() if key.startswith(path + ".")]
        if inside:
            return min(inside)
        path = path.rpartition(".")[0]
    return 0


def _paths_of_operations(graph: SpikeGraph) -> Mapping[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for node in graph.graph.nodes:
        stage = facts.get(node, Stage)
        if stage is not None and node.op in ("call_function", "call_method"):
            found[facts.origin(node).module].add(stage.index)
    return found
