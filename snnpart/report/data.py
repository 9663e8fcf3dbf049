"""The report as data. Field names are the keys of the JSON form (`docs/report-schema.json` is made from this file).

Sizes are bytes, times microseconds, both at the example batch; "a step" is one training step of that batch, with all
its microbatches. Bytes of a collective are the size of the tensor that the operation moves, not the traffic of the
algorithm that a library picks for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from snnpart.errors import ConfigError
from snnpart.explain import Why

VERSION = 1


@dataclass(frozen=True, slots=True)
class Topology:
    """The mesh and the schedule. `ranks` is the number of ranks of one data-parallel copy, tp * pp. `predicted_us` are
    those of all stages together, forward and backward of the batch on the slowest tp rank; `unsharded_us` the same
    with every layer whole."""

    tp: int
    pp: int
    dp: str
    ranks: int
    schedule: str
    microbatches: int
    predicted_us: float
    unsharded_us: float


@dataclass(frozen=True, slots=True)
class Network:
    """What was compiled: sizes of the example, and counts over the whole network."""

    name: str
    batch: int
    batch_fixed: str
    time_steps: int | None
    nodes: int
    parameters: int
    neuron_layers: int
    training_specialised: bool


@dataclass(frozen=True, slots=True)
class StageRow:
    """One pipeline stage. `parameters` counts the user's numbers, `parameters_per_rank` what a tp rank holds of them
    (the largest rank). `balance` is its predicted time over that of the slowest stage."""

    index: int
    modules: tuple[str, ...]
    parameters: int
    parameters_per_rank: int
    flops: float
    predicted_us: float
    peak_bytes: int
    balance: float


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What a pipeline rank holds in a training step (the largest tp rank), in bytes: tensors, the two moments an
    optimizer such as Adam keeps, and the most that microbatches in flight keep for backward at one time. `limit` is
    what `memory=` allows, `peak` the most at one time of a step, with what runs needs for a while."""

    rank: int
    stages: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    saved: int
    total: int
    peak: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class UnitRow:
    """An FSDP2 unit of a stage: the modules whose parameters are gathered together, as the largest tp rank has them,
    in bytes of all dp ranks. `again`: they are sharded again after forward and gathered once more for backward."""

    stage: int
    unit: int
    modules: tuple[str, ...]
    parameters: int
    bytes: int
    again: bool


@dataclass(frozen=True, slots=True)
class ScheduleGrid:
    """The pipeline schedule, a line a rank, a column a tick: `0F1` is stage 0, forward, microbatch 1; B the backward,
    I and W its halves. Stages count as equal there. `bubble` is the share of time in which ranks wait, by the
    predicted times of the stages; `bubble_of_equal_stages` what the schedule itself costs."""

    lines: tuple[str, ...]
    bubble: float
    bubble_of_equal_stages: float


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A layer that is split over tp: the rule, how each of its tensors lies (`weight: S(0) 32+32`), the collectives at
    it and the bytes they move in a step."""

    module: str
    operation: str
    stage: int
    rule: str
    tensors: tuple[str, ...]
    collectives: tuple[str, ...]
    bytes_per_step: int


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective of the program: node, where it belongs, its axis, and the bytes forward and backward in a step."""

    node: str
    stage: int
    module: str
    operation: str
    axis: str
    shape: tuple[int, ...]
    dtype: str
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class SentValue:
    """A value that crosses a stage boundary, as one tp rank sends it: `bytes` in memory, `wire_bytes` as it travels, in
    `bits` an element where it has few states. A gradient comes back as `bytes`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    bits: int | None
    wire_bytes: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class BoundaryRow:
    """Between two neighbouring stages: what each tp rank sends forward in a step, and back as gradients."""

    source: int
    target: int
    values: tuple[SentValue, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicatedRow:
    """A layer with weights that every tp rank holds whole, and why."""

    module: str
    operation: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint region: its stage, the modules in it, and the saved bytes that it drops."""

    region: int
    stage: int
    modules: tuple[str, ...]
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class AssumptionRow:
    """Something that the trace took as fixed."""

    kind: str
    text: str
    place: str


@dataclass(frozen=True, slots=True)
class StateRow:
    """State that was found: of a neuron layer of a framework, or an attribute of a hand-written module."""

    module: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class PassRow:
    """A pass that ran."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a stage's graph on tp rank 0, for the drawing."""

    name: str
    stage: int
    module: str
    operation: str
    kind: str
    shape: tuple[int, ...]
    placement: str
    us: float
    inputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything about one compiled program, ready to be shown."""

    snnpart: str
    torch: str
    fingerprint: str
    network: Network
    topology: Topology
    stages: tuple[StageRow, ...]
    memory: tuple[MemoryRow, ...]
    units: tuple[UnitRow, ...]
    schedule: ScheduleGrid | None
    sharded: tuple[ShardRow, ...]
    replicated: tuple[ReplicatedRow, ...]
    collectives: tuple[CollectiveRow, ...]
    boundaries: tuple[BoundaryRow, ...]
    checkpoints: tuple[CheckpointRow, ...]
    assumptions: tuple[AssumptionRow, ...]
    states: tuple[StateRow, ...]
    unused_parameters: tuple[str, ...]
    passes: tuple[PassRow, ...]
    notices: tuple[str, ...]
    gate: dict[str, Any] | None
    graph: tuple[GraphNode, ...] = field(repr=False)

    def why(self, path: str) -> Why:
        """The rules that the layer at this module path could have, what a step would cost with each, and why the others
        lost or are unavailable; print it.

        Raises:
            PlanError: the network has no such layer.
            ConfigError: the report was not made by `ParallelProgram.report()`, which knows the graph and the machine.
        """
        explain = getattr(self, "_explain", None)
        if explain is None:
            raise ConfigError(
                "this report does not know the alternatives of its plan", fix="use ParallelProgram.report()"
            )
        found: Why = explain(path)
        return found

    def text(self, width: int = 120) -> str:
        """The report for a terminal `width` columns wide, without colours."""
        from snnpart.report.text import render

        return render(self, width)

    def to_json(self) -> str:
        """The report as JSON, as `docs/report-schema.json` describes."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def html(self) -> str:
        """One page with everything in it: opens without a network."""
        from snnpart.report.html import page

        return page(self)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the form that the file's ending says: .html, .json, anything else is text."""
        target = Path(path)
        forms = {".html": self.html, ".htm": self.html, ".json": self.to_json}
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(forms.get(target.suffix, self.text)(), encoding="utf-8")
        return target

    def __str__(self) -> str:
        return self.text()
