"""The report in words: titled tables and lists, from which the terminal form and the page are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from snnpart.report.data import Report


@dataclass(frozen=True, slots=True)
class Section:
    """A table (columns; those that start with `>` hold numbers) or, without columns, a list of lines."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(report: Report) -> tuple[Section, ...]:
    """All sections that have something to say, in reading order."""
    return tuple(section for make in SECTIONS for section in make(report) if section.rows)


def size(count: float) -> str:
    """Bytes with a unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def duration(us: float) -> str:
    """Microseconds with a unit: `3.9 s`."""
    for unit in ("µs", "ms"):
        if abs(us) < 1000:
            return f"{us:.3g} {unit}"
        us /= 1000
    return f"{us:.3g} s"


def number(count: float) -> str:
    """A count with a metric prefix: `11.2 M`."""
    for unit in ("", " k", " M", " G"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.2f}{unit}"
        count /= 1000
    return f"{count:.2f} T"


def heading(report: Report) -> str:
    """Name, sizes and topology in three lines."""
    network, topology = report.network, report.topology
    steps = f", {network.time_steps} calls of one step" if network.time_steps else ""
    fixed = f" (fixed: {network.batch_fixed})" if network.batch_fixed else ""
    return "\n".join(
        (
            f"{network.name}: {number(network.parameters)} parameters, {network.neuron_layers} neuron layers, "
            f"{network.nodes} nodes, example batch {network.batch}{fixed}{steps}",
            f"tp={topology.tp} pp={topology.pp} dp={topology.dp} over a multiple of {topology.ranks} ranks, "
            f"schedule {topology.schedule}, {topology.microbatches} microbatch(es)",
            f"plan {report.fingerprint}, snnpart {report.snnpart}, torch {report.torch}",
        )
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Section]:
    return [Section(title, tuple(columns), tuple(tuple(str(cell) for cell in row) for row in rows))]


def _lines(title: str, lines: Iterable[str]) -> list[Section]:
    return [Section(title, (), tuple((line,) for line in lines))]


def _stages(report: Report) -> list[Section]:
    columns = ("stage", "modules", ">parameters", ">per rank", ">flops", ">predicted time", ">peak", ">balance")
    rows = [
        (
            s.index,
            ", ".join(s.modules),
            number(s.parameters),
            number(s.parameters_per_rank),
            number(s.flops),
            duration(s.predicted_us),
            size(s.peak_bytes),
            f"{s.balance:.0%}",
        )
        for s in report.stages
    ]
    return _table("Stages", columns, rows)


def _memory(report: Report) -> list[Section]:
    tensors = (">parameters", ">gradients", ">optimizer", ">buffers")
    columns = (">rank", "stages", *tensors, ">saved", ">in all", ">peak", ">limit")
    rows = [
        (
            m.rank,
            ", ".join(map(str, m.stages)),
            *map(size, (m.parameters, m.gradients, m.optimizer, m.buffers, m.saved, m.total, m.peak)),
            size(m.limit) if m.limit else "",
        )
        for m in report.memory
    ]
    return _table("Memory of a pipeline rank in training", columns, rows)


def _units(report: Report) -> list[Section]:
    columns = (">stage", ">unit", "modules", ">parameters", ">bytes")
    rows = [(u.stage, u.unit, ", ".join(u.modules), number(u.parameters), size(u.bytes)) for u in report.units]
    again = "sharded again after forward" if any(u.again for u in report.units) else "whole until the step ends"
    return _table(f"FSDP2 units: {again}", columns, rows) if rows else []


def _schedule(report: Report) -> list[Section]:
    grid = report.schedule
    if grid is None:
        return []
    bubble = f"{grid.bubble:.0%} by predicted times, {grid.bubble_of_equal_stages:.0%} with equal stages"
    return _lines(f"Schedule {report.topology.schedule}: ranks wait {bubble}", grid.lines)


def _sharded(report: Report) -> list[Section]:
    columns = ("layer", "operation", ">stage", "rule", "tensors", "collectives", ">bytes a step")
    rows = [
        (
            r.module,
            r.operation,
            r.stage,
            r.rule,
            ", ".join(r.tensors),
            ", ".join(r.collectives),
            size(r.bytes_per_step) if r.bytes_per_step else "",
        )
        for r in report.sharded
    ]
    return _table(f"Layers split over tp{_gain(report)}", columns, rows)


def _gain(report: Report) -> str:
    """What sharing is predicted to be worth: the step with every layer whole, and as it was decided."""
    whole, chosen = report.topology.unsharded_us, report.topology.predicted_us
    if not whole or not chosen:
        return ""
    return f": a step takes {duration(chosen)} by the profile, {duration(whole)} unsharded ({whole / chosen:.2f} times)"


def _replicated(report: Report) -> list[Section]:
    rows = [(r.module, r.operation, r.reason) for r in report.replicated]
    return _table("Whole on every tp rank", ("layer or node", "operation", "why"), rows)


def _boundaries(report: Report) -> list[Section]:
    rows = [
        (
            f"{b.source} -> {b.target}",
            ", ".join(f"{v.name} {v.dtype}{list(v.shape)}" + (f" as {v.bits} bit" if v.bits else "") for v in b.values),
            size(b.forward_bytes),
            size(b.backward_bytes),
        )
        for b in report.boundaries
    ]
    return _table("Stage boundaries (each tp rank, a step)", ("stages", "values", ">forward", ">backward"), rows)


def _checkpoints(report: Report) -> list[Section]:
    rows = [(c.region, c.stage, ", ".join(c.modules), size(c.saved_bytes)) for c in report.checkpoints]
    return _table("Checkpoint regions", (">region", ">stage", "modules", ">bytes dropped"), rows)


def _passes(report: Report) -> list[Section]:
    rows = [(p.name, f"{p.seconds * 1e3:.1f}", p.nodes_before, p.nodes_after) for p in report.passes]
    return _table("Passes", ("pass", ">ms", ">nodes before", ">after"), rows)


def _found(report: Report) -> list[Section]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for s in report.states:
        kinds.setdefault((s.kind, s.detail), []).append(s.module or "(the module itself)")
    states = [f"{kind} ({detail}): {', '.join(modules)}" for (kind, detail), modules in kinds.items()]
    assumptions = [f"{a.kind}: {a.text}" + (f" [{a.place}]" if a.place else "") for a in report.assumptions]
    silent = any(a.kind == "neuron" for a in report.assumptions)
    why = "this network has no spiking neuron" if silent else "its neurons keep none on a module between forward calls"
    return [
        *_lines("Neuron state, reset before every microbatch", states or [f"none: {why}"]),
        *_lines("Assumptions made while tracing", assumptions),
        *_lines("Parameters that forward does not use (kept, no gradient)", report.unused_parameters),
        *_lines("Notices", report.notices),
    ]


def _gate(report: Report) -> list[Section]:
    if report.gate is None:
        return _lines("Gate", ["off: the program was not compared with the module"])
    return _lines("Gate", (f"{key}: {gate_value(value)}" for key, value in report.gate.items()))


def gate_value(value: Any) -> str:
    """A value of the gate's report in one line."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(gate_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {gate_value(item)}" for key, item in value.items()) or "none"
    return str(value)


SECTIONS = (
    _stages,
    _memory,
    _units,
    _schedule,
    _sharded,
    _replicated,
    _boundaries,
    _checkpoints,
    _found,
    _gate,
    _passes,
)
