"""From a compiled program to a report.

Everything is read off the rank programs (what runs), the plan (what was decided) and the source graph (what was
traced). Costs and placements stand on nodes of the source graph; a node of a stage keeps the name of the one it was
made from, so the two are joined by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import snnpart
from snnpart import facts, timeline
from snnpart.bits import width
from snnpart.explain import Why
from snnpart.facts import Checkpoint, Cost
from snnpart.program import CompiledProgram
from snnpart.report import data, layers, nodes


def build(compiled: CompiledProgram, gate: Any = None, explain: Callable[[str], Why] | None = None) -> data.Report:
    """The report of `compiled`; `gate` is the gate's own report (a dataclass), or None when nothing was compared.
    `explain` answers `Report.why`."""
    report = _build(compiled, gate)
    object.__setattr__(report, "_explain", explain)
    return report


def _build(compiled: CompiledProgram, gate: Any) -> data.Report:
    source = compiled.source
    moves = nodes.collectives(compiled)
    return data.Report(
        snnpart=snnpart.__version__,
        torch=torch.__version__,
        fingerprint=compiled.plan.fingerprint,
        network=_network(compiled),
        topology=_topology(compiled),
        stages=_stages(compiled),
        memory=_memory(compiled),
        units=_units(compiled),
        schedule=_schedule(compiled),
        sharded=layers.sharded(compiled, moves),
        replicated=layers.replicated(compiled),
        collectives=moves,
        boundaries=_boundaries(compiled),
        checkpoints=_checkpoints(compiled),
        assumptions=tuple(data.AssumptionRow(a.kind, a.text, a.place) for a in source.assumptions),
        states=_states(compiled),
        unused_parameters=tuple(t.name for t in source.tensors.values() if t.kind == "parameter" and not t.used),
        passes=tuple(data.PassRow(**dataclasses.asdict(record)) for record in compiled.passes),
        notices=(*compiled.notices, *_notes_of_passes(compiled)),
        gate=None if gate is None else _gate(gate),
        graph=nodes.drawn(compiled),
    )


def _notes_of_passes(compiled: CompiledProgram) -> list[str]:
    """What the passes that ran have to say: how far a loop folded, and why the rest did not."""
    notes = compiled.source.notes
    return [f"{r.name}: {line}" for r in compiled.passes for line in notes.get(r.name, "").splitlines()]


def _gate(gate: Any) -> Any:
    """The gate's figures; what it compared with is not among them."""
    shown = dataclasses.asdict(dataclasses.replace(gate, reference=None) if hasattr(gate, "reference") else gate)
    return plain({name: value for name, value in shown.items() if name != "reference"})


def plain(value: Any) -> Any:
    """The value in JSON's types: anything that JSON does not know becomes its text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _network(compiled: CompiledProgram) -> data.Network:
    source = compiled.source
    return data.Network(
        name=source.name,
        batch=source.batch,
        batch_fixed=source.batch_fixed,
        time_steps=source.time_steps,
        nodes=len(source.graph.nodes),
        parameters=sum(t.tensor.numel() for t in source.tensors.values() if t.kind == "parameter"),
        neuron_layers=sum(leaf.neuron for leaf in source.leaves.values()),
        training_specialised=source.training_specialised,
    )


def _topology(compiled: CompiledProgram) -> data.Topology:
    plan = compiled.plan
    whole = sum(cost.us for node in compiled.source.graph.nodes if (cost := facts.get(node, Cost)) is not None)
    return data.Topology(
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        ranks=plan.tp * plan.pp,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        predicted_us=sum(_times(compiled)),
        unsharded_us=whole,
    )


def _times(compiled: CompiledProgram) -> list[float]:
    """Predicted microseconds of each stage on its slowest tp rank."""
    plan = compiled.plan
    return [max(compiled.stage(stage, tp).predicted_us for tp in range(plan.tp)) for stage in range(plan.stage_count)]


def _stages(compiled: CompiledProgram) -> tuple[data.StageRow, ...]:
    times = _times(compiled)
    slowest = max(times) or 1.0
    return tuple(_stage(compiled, stage, time, time / slowest) for stage, time in enumerate(times))


def _stage(compiled: CompiledProgram, stage: int, time: float, balance: float) -> data.StageRow:
    ranks = [compiled.stage(stage, tp) for tp in range(compiled.plan.tp)]
    costs = nodes.costs(compiled)
    held = [[t for t in rank.tensors if t.kind == "parameter"] for rank in ranks]
    return data.StageRow(
        index=stage,
        modules=layers.modules_of(compiled.plan.stages, stage, [facts.origin(n).module for n in ranks[0].graph.nodes]),
        parameters=sum(torch.Size(t.global_shape).numel() for t in held[0]),
        parameters_per_rank=max(sum(torch.Size(t.shape).numel() for t in rank) for rank in held),
        flops=sum(costs.get(node.name, Cost()).flops for node in ranks[0].graph.nodes),
        predicted_us=time,
        peak_bytes=max(rank.predicted_bytes for rank in ranks),
        balance=balance,
    )


def _memory(compiled: CompiledProgram) -> tuple[data.MemoryRow, ...]:
    plan = compiled.plan
    rows = []
    for rank in range(plan.pp):
        held = max((compiled.footprint(rank, tp) for tp in range(plan.tp)), key=lambda footprint: footprint.total)
        rows.append(
            data.MemoryRow(
                rank, plan.stages_of(rank), **dataclasses.asdict(held), total=held.total, limit=plan.memory or None
            )
        )
    return tuple(rows)


def _units(compiled: CompiledProgram) -> tuple[data.UnitRow, ...]:
    """Those of each stage, in the order in which they are gathered."""
    rows = []
    for stage in range(compiled.plan.stage_count):
        of_rank = [compiled.stage(stage, tp).tensors for tp in range(compiled.plan.tp)]
        for unit in sorted({part.unit for part in of_rank[0] if part.unit is not None}):
            sizes = [[torch.Size(p.shape).numel() for p in parts if p.unit == unit] for parts in of_rank]
            modules = layers.modules_of(compiled.plan.units, unit, [p.name for p in of_rank[0] if p.unit == unit])
            most = max(
                sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in parts if p.unit == unit)
                for parts in of_rank
            )
            rows.append(data.UnitRow(stage, unit, modules, max(map(sum, sizes)), most, compiled.plan.reshard))
    return tuple(rows)


def _schedule(compiled: CompiledProgram) -> data.ScheduleGrid | None:
    """The grid; None without a pipeline."""
    if compiled.plan.pp == 1:
        return None
    ticks = timeline.in_ticks(compiled.schedule)
    return data.ScheduleGrid(ticks.grid(), timeline.predicted(compiled).bubble, ticks.bubble)


def _boundaries(compiled: CompiledProgram) -> tuple[data.BoundaryRow, ...]:
    return tuple(_boundary(compiled, stage) for stage in range(compiled.plan.stage_count - 1))


def _boundary(compiled: CompiledProgram, stage: int) -> data.BoundaryRow:
    values = tuple(
        data.SentValue(
            port.name,
            port.value.shape,
            nodes.dtype_name(port.value.dtype),
            port.value.bytes,
            None if port.states is None else width(port.states[1]),
            port.wire_bytes,
            port.value.requires_grad,
        )
        for port in compiled.stage(stage, 0).sends
    )
    back = sum(value.bytes for value in values if value.gradient)
    return data.BoundaryRow(stage, stage + 1, values, sum(value.wire_bytes for value in values), back)


def _checkpoints(compiled: CompiledProgram) -> tuple[data.CheckpointRow, ...]:
    regions: dict[tuple[int, int], list[Any]] = {}
    for stage in range(compiled.plan.stage_count):
        for node in compiled.stage(stage, 0).graph.nodes:
            region = facts.get(node, Checkpoint)
            if region is not None:
                regions.setdefault((region.region, stage), []).append(node)
    costs = nodes.costs(compiled)
    return tuple(
        data.CheckpointRow(
            region,
            stage,
            tuple(dict.fromkeys(facts.origin(node).module for node in members)),
            int(sum(costs.get(node.name, Cost()).saved for node in members)),
        )
        for (region, stage), members in sorted(regions.items())
    )


def _states(compiled: CompiledProgram) -> tuple[data.StateRow, ...]:
    source = compiled.source
    calls: dict[str, int] = {}
    for node in source.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    rows = [
        data.StateRow(path, type(leaf.module).__name__, f"{leaf.framework}, {calls.get(path, 0)} call(s) a forward")
        for path, leaf in source.leaves.items()
        if leaf.neuron
    ]
    rows += [data.StateRow(slot.module, slot.name, f"starts as {slot.initial}") for slot in source.states]
    return tuple(rows)
