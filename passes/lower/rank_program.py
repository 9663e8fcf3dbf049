"""From a graph and a plan to one program per rank.

For each tp rank the graph is sharded, then cut into stages; every tensor goes to the stage that reads it, a tensor that
nothing reads to the stage of its module. What the stage will take in time and memory is added up from the costs.

Peak bytes of a rank: its tensors, one gradient for each parameter, and the values saved for backward, times the most
microbatches in flight on the stage. Optimizer state is the user's and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, Sharded
from snnpart.graph import SpikeGraph, TensorInfo
from snnpart.orders import Schedule, in_flight, make_schedule
from snnpart.passes.decide.placement import apply_shards
from snnpart.passes.decide.stages import apply_stages, lookup
from snnpart.passes.lower.cut_stages import StageGraph, cut_stages
from snnpart.passes.rewrite.fuse_neurons import fuse_neurons
from snnpart.passes.rewrite.shard_channels import LocalTensor, local_tensors, shard_for_rank, twin
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
    cuts: dict[int, tuple[StageGraph, ...]] = {}
    stays: dict[str, None] = {}
    for rank in range(plan.tp):
        same = twin(source, rank)
        if same not in cuts:
            cuts[same] = cut_stages(shard_for_rank(source, plan.tp, rank, profile), plan.stage_count)
            stays |= dict.fromkeys(_fuse(source, plan, cuts[same], profile))
        cuts[rank] = cuts[same]
        for stage, names in enumerate(_tensors_of_stages(source, plan, cuts[rank])):
            slices = tuple(_slice(source.tensors[name], tensors.get(name), rank) for name in names)
            programs[stage, rank] = _program(source, plan, cuts[rank][stage], slices, schedule, (stage, rank))
    return CompiledProgram(source=source, plan=plan, stages=programs, schedule=schedule, notices=tuple(stays))


def _fuse(source: SpikeGraph, plan: Plan, cuts: tuple[StageGraph, ...], profile: MachineProfile) -> tuple[str, ...]:
    """Fuse the neurons of every stage if the plan says so; why others stay as they are."""
    if not plan.fuse:
        return ()
    return tuple(
        reason for cut in cuts for reason in fuse_neurons(cut.graph, source.leaves, profile, state=plan.neuron_dtype)
    )


def _tensors_of_stages(graph: SpikeGraph, plan: Plan, cuts: tuple[StageGraph, ...]) -> list[list[str]]:
    """Names of the tensors of each stage, in the order of the user's module."""
    read_in = {name: stage for stage, cut in enumerate(cuts) for name in cut.tensors}
    leaf_in = {path: stage for stage, cut in enumerate(cuts) for path in cut.leaves}
    found: list[list[str]] = [[] for _ in cuts]
    for name, info in graph.tensors.items():
        stage = read_in.get(name, leaf_in.get(info.leaf) if info.leaf else None)
        found[stage if stage is not None else lookup(plan.stages, name) or 0].append(name)
    return found


def _slice(info: TensorInfo, local: LocalTensor | None, rank: int) -> TensorSlice:
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
    )


@dataclass(frozen=True)
class _Predicted:
    us: float
    bytes: int


def _program(
    source: SpikeGraph,
    plan: Plan,
    cut: StageGraph,
    slices: tuple[TensorSlice, ...],
    schedule: Schedule,
    at: tuple[int, int],
) -> StageProgram:
    held = in_flight(schedule[plan.rank_of(at[0])], at[0]) / plan.microbatches
    predicted = _predict(cut.graph, slices, held)
    return StageProgram(
        stage=at[0],
        tp_rank=at[1],
        graph=cut.graph,
        reads=cut.reads,
        receives=cut.receives,
        sends=cut.sends,
        tensors=slices,
        leaves={path: source.leaves[path] for path in cut.leaves},
        predicted_us=predicted.us,
        predicted_bytes=predicted.bytes,
    )


def _predict(graph: fx.Graph, slices: tuple[TensorSlice, ...], held: float) -> _Predicted:
    """Time of one step and peak bytes; `held` is the share of the batch whose saved values are there at once."""
    costs = [cost for node in graph.nodes if (cost := facts.get(node, Cost)) is not None]
    saved = sum(cost.saved for cost in costs)
    tensors = sum(_bytes(item) * (2 if item.requires_grad else 1) for item in slices)
    return _Predicted(sum(cost.us for cost in costs), int(tensors + saved * held))


def _bytes(item: TensorSlice) -> int:
    size = item.dtype.itemsize
    for extent in item.shape:
        size *= extent
    return size
