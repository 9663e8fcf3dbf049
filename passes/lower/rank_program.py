"""From a graph and a plan to one program per rank.

For each tp rank the graph is sharded, then cut into stages; every tensor goes to the stage that reads it, a tensor that
nothing reads to the stage of its module. What the stage will take in time and memory (`footprint`) is added up from the
costs.
"""

from __future__ import annotations

from dataclasses import replace

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, Sharded
from snnpart.footprint import MOMENTS, Footprint, largest_part
from snnpart.graph import SpikeGraph, TensorInfo
from snnpart.orders import Schedule, in_flight, make_schedule
from snnpart.passes.analyze.kinds import kind_of
from snnpart.passes.decide.placement import apply_shards
from snnpart.passes.decide.stages import apply_stages, lookup
from snnpart.passes.decide.tied import MADE_BY
from snnpart.passes.lower.cut_stages import StageGraph, cut_stages
from snnpart.passes.lower.kernels import Kernels
from snnpart.passes.lower.rounds import take_rounds
from snnpart.passes.lower.stage_memory import stage_memory
from snnpart.passes.lower.units import with_units
from snnpart.passes.rewrite.shard_channels import LocalTensor, local_tensors, shard_for_rank, twin
from snnpart.passes.rewrite.weights_later import put_weights_off
from snnpart.plan import Plan
from snnpart.program import CompiledProgram, StageProgram, TensorSlice


def lower(graph: SpikeGraph, plan: Plan, *, profile: MachineProfile) -> CompiledProgram:
    """The program of every rank. `graph` is analysed and is left as it is; the program's source is a copy with the
    plan's `Placement` and `Stage` facts on it.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    source = graph.copy()
    apply_shards(source, plan)
    apply_stages(source, plan)
    schedule = make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_rank)
    tensors = local_tensors(source)
    programs: dict[tuple[int, int], StageProgram] = {}
    kernels = Kernels(plan, source.leaves, profile)
    twins = [twin(source, rank) for rank in range(plan.tp)]
    cuts = {
        rank: cut_stages(shard_for_rank(source, plan.tp, rank, profile), plan.stage_count, source.kept)
        for rank in dict.fromkeys(twins)
    }
    prepared = kernels.prepare([[cut.graph for cut in own] for own in cuts.values()])
    evaluations = dict(zip(cuts, prepared, strict=True))
    for rank, same in enumerate(twins):
        cuts[rank] = cuts[same]
        held = _tensors_of_stages(source, plan, cuts[rank])
        holders = {name: tuple(s for s, names in enumerate(held) if name in names) for name in plan.tied}
        for stage, names in enumerate(held):
            slices = tuple(
                _slice(source.tensors[name], tensors.get(name), rank, kernels, holders.get(name, ())) for name in names
            )
            program = _program(source, plan, cuts[rank][stage], slices, schedule, (stage, rank), profile)
            programs[stage, rank] = replace(program, evaluation=evaluations[same][stage])
    notices = (*kernels.notices, *source.notes.get(MADE_BY, "").splitlines())
    programs = take_rounds(programs, plan)
    if plan.tp > 1 and not plan.splits_backward:
        for stage in range(plan.stage_count):
            put_weights_off([programs[stage, rank].graph for rank in range(plan.tp)])
    stages = with_units(programs, plan)
    return CompiledProgram(source=source, plan=plan, stages=stages, schedule=schedule, notices=notices)


def _tensors_of_stages(graph: SpikeGraph, plan: Plan, cuts: tuple[StageGraph, ...]) -> list[list[str]]:
    """Names of the tensors of each stage, in the order of the user's module."""
    reads = [frozenset(cut.tensors) for cut in cuts]
    held = graph.in_leaves()
    inside = {name: stage for stage, cut in enumerate(cuts) for path in cut.leaves for name in held.get(path, ())}
    found: list[list[str]] = [[] for _ in cuts]
    for name in graph.tensors:
        unread = inside[name] if name in inside else lookup(plan.stages, name) or 0
        for stage in [s for s, names in enumerate(reads) if name in names] or [unread]:
            found[stage].append(name)
    return found


def _slice(
    info: TensorInfo, local: LocalTensor | None, rank: int, kernels: Kernels, stages: tuple[int, ...]
) -> TensorSlice:
    spread = local.spread if local else None
    return TensorSlice(
        name=info.name,
        kind=info.kind,
        global_shape=tuple(info.tensor.shape),
        dtype=info.tensor.dtype,
        dim=spread.dim if isinstance(spread, Sharded) else None,
        pieces=spread.pieces[rank] if isinstance(spread, Sharded) else (),
        requires_grad=info.tensor.requires_grad,
        persistent=info.persistent,
        leaf=info.leaf,
        aliases=info.aliases,
        has_gradient=info.used and info.tensor.requires_grad,
        partial_gradient=bool(local and local.partial_gradient),
        channels_last=info.name in kernels.weights,
        stages=stages if len(stages) > 1 else (),
    )


def _program(
    source: SpikeGraph,
    plan: Plan,
    cut: StageGraph,
    slices: tuple[TensorSlice, ...],
    schedule: Schedule,
    at: tuple[int, int],
    profile: MachineProfile,
) -> StageProgram:
    costs = [cost for node in cut.graph.nodes if (cost := facts.get(node, Cost)) is not None]
    held = in_flight(schedule[plan.rank_of(at[0])], at[0])
    return StageProgram(
        stage=at[0],
        tp_rank=at[1],
        graph=cut.graph,
        reads=cut.reads,
        receives=cut.receives,
        sends=cut.sends,
        keeps=cut.keeps,
        tensors=slices,
        leaves={path: source.leaves[path] for path in cut.leaves},
        forward_us=sum(cost.forward_us for cost in costs),
        backward_us=sum(cost.backward_us for cost in costs),
        footprint=_footprint(cut, slices, largest_part(source.batch, plan.microbatches), held, profile),
    )


def _footprint(
    cut: StageGraph, slices: tuple[TensorSlice, ...], part: float, held: int, profile: MachineProfile
) -> Footprint:
    """`part` of the example batch is in the largest microbatch, `held` of them are in flight."""
    trained = [item.bytes for item in slices if item.requires_grad and item.has_gradient]
    parameters = sum(item.bytes for item in slices if item.kind == "parameter" or item.requires_grad)
    memory = stage_memory(cut, part)
    return Footprint(
        parameters=parameters,
        gradients=sum(trained),
        optimizer=MOMENTS * sum(trained),
        buffers=sum(item.bytes for item in slices) - parameters,
        saved=int(memory.saved),
        in_flight=held,
        forward=int(memory.forward),
        first_backward=int(memory.first_backward),
        backward=int(memory.backward),
        inputs=int(memory.inputs),
        gates=int(memory.gates),
        largest=max(trained, default=0),
        workspace=int(profile.workspace) * any(kind_of(node) in ("linear", "matmul") for node in cut.graph.nodes),
    )
