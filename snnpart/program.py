"""What lowering leaves: one program per rank, as data. The runtime decides nothing; whatever it does stands here.

Ranks that differ on dp only run the same program, so programs are keyed by (stage, tp rank).

Form of a stage graph: placeholders are the program inputs it reads (`reads`, in order), then the received values
(`receives`), then `batch_size` if a size depends on the batch. It returns one flat tuple: the sent values (`sends`), or
on the last stage the program's outputs. Values travel to the next stage only: what a later stage needs is handed on by
the stages between. `get_attr` and `call_module` targets are the user's names, now local slices and local copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, fx

from snnpart.bits import States, packed_bytes
from snnpart.facts import Pieces, Value
from snnpart.footprint import Footprint, RankFootprint, in_shards, of_rank
from snnpart.graph import LeafInfo, SpikeGraph
from snnpart.plan import Plan


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor of one rank: which part of the user's tensor it is.

    `dim` None means the whole tensor; otherwise the rank holds the intervals `pieces` of that dim. `partial_gradient`:
    after backward the gradient is this rank's part of a sum over tp and must be all-reduced. `channels_last`: the order
    in which a convolution's weight lies in memory. `stages`: those that hold a copy, where they are several; the
    gradient is the sum of theirs, and the first one stands for the tensor where it is counted or written. `unit`: the
    FSDP2 unit it is gathered in; `rounds`: under autocast all that is read of it is its numbers in half precision.
    """

    name: str
    kind: Literal["parameter", "buffer", "constant"]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    pieces: Pieces = ()
    requires_grad: bool = False
    persistent: bool = True
    leaf: str | None = None
    aliases: tuple[str, ...] = ()
    has_gradient: bool = True
    partial_gradient: bool = False
    channels_last: bool = False
    unit: int | None = None
    rounds: bool = False
    stages: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.global_shape
        size = sum(stop - start for start, stop in self.pieces)
        return (*self.global_shape[: self.dim], size, *self.global_shape[self.dim + 1 :])

    @property
    def bytes(self) -> int:
        """Bytes of the rank's part."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Port:
    """A value that crosses a stage boundary, with its local shape on this tp rank.

    `states`: it travels forward as bits (see `bits`); its gradient comes back in the compute dtype.
    """

    name: str
    value: Value
    states: States | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes that go forward, at the example batch."""
        return self.value.bytes if self.states is None else packed_bytes(self.value.numel, self.states[1])


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's schedule: one microbatch on one stage. Prints as `0F1`.

    F is the forward, B the whole backward, I the gradients of what the stage received, W those of its weights.
    """

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        for kind in ("F", "B", "I", "W"):
            stage, found, microbatch = text.partition(kind)
            if found:
                return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]
        raise ValueError(f"not an action: {text!r}")


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """What one (stage, tp rank) runs. `evaluation`: the graph of forwards in eval mode that want no gradient, of the
    same form, where it is another one (norms folded into the layers before them). `keeps`: which of the outputs that
    stay where they are made (`SpikeGraph.kept`) this stage makes; they come after what it sends or answers."""

    stage: int
    tp_rank: int
    graph: fx.Graph
    reads: tuple[str, ...]
    receives: tuple[Port, ...]
    sends: tuple[Port, ...]
    tensors: tuple[TensorSlice, ...]
    leaves: Mapping[str, LeafInfo]
    forward_us: float = 0.0
    backward_us: float = 0.0
    footprint: Footprint = Footprint()
    evaluation: fx.Graph | None = None
    keeps: tuple[int, ...] = ()

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """All graphs of the stage."""
        return (self.graph,) if self.evaluation is None else (self.graph, self.evaluation)

    @property
    def predicted_us(self) -> float:
        """Predicted time of a step, all microbatches together."""
        return self.forward_us + self.backward_us

    @property
    def predicted_bytes(self) -> int:
        """The most that the stage holds at one time."""
        return self.footprint.total

    def inside(self, leaf: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `tensors` (by the user's names) that lie inside a leaf, by names relative to it, tied ones too."""
        return {
            name[len(leaf) + 1 :]: tensors[part.name]
            for part in self.tensors
            for name in (part.name, *part.aliases)
            if name.startswith(f"{leaf}.") and part.name in tensors
        }


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass that ran: its name, seconds, and the change in the number of nodes."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A lowered network: the analysed source graph, the plan, and each rank's program.

    `stages` by (stage, tp rank), `schedule` by pipeline rank.
    """

    source: SpikeGraph
    plan: Plan
    stages: Mapping[tuple[int, int], StageProgram]
    schedule: Mapping[int, tuple[Action, ...]]
    passes: tuple[PassRecord, ...] = ()
    notices: tuple[str, ...] = field(default=())

    def stage(self, stage: int, tp_rank: int) -> StageProgram:
        return self.stages[stage, tp_rank]

    def footprint(self, pp_rank: int, tp_rank: int, dp: int = 2) -> RankFootprint:
        """What a rank holds in a step. `dp`: the ranks over which FSDP2 shards, of which there are two at least."""
        stages = {program.stage: self.footprint_of(program, dp) for program in self.of_rank(pp_rank, tp_rank)}
        return of_rank(self.schedule[pp_rank], stages)

    def footprint_of(self, program: StageProgram, dp: int = 2) -> Footprint:
        """What a rank holds of one stage; `dp` as in `footprint`."""
        if self.plan.dp != "fsdp2":
            return program.footprint
        sizes: dict[int, int] = {}
        for part in program.tensors:
            if part.unit is not None:
                sizes[part.unit] = sizes.get(part.unit, 0) + part.bytes
        units = [size for _, size in sorted(sizes.items())]
        return in_shards(program.footprint, units, dp, self.plan.reshard, self.plan.microbatches)

    def moved_states(self) -> tuple[tuple[int, int], ...]:
        """Of a network whose last inputs are the states that calls before kept: those that another pipeline rank reads
        than kept them, as (position among the inputs, who kept it)."""
        kept, inputs = self.source.kept, self.source.inputs
        programs = [self.stage(stage, 0) for stage in range(self.plan.stage_count)]
        home = {slot: self.plan.rank_of(program.stage) for program in programs for slot in program.keeps}
        found = []
        for slot in range(kept):
            position = len(inputs) - kept + slot
            readers = {self.plan.rank_of(p.stage) for p in programs if inputs[position].name in p.reads}
            if readers - {home[slot]}:
                found.append((position, home[slot]))
        return tuple(found)

    def of_rank(self, pp_rank: int, tp_rank: int) -> tuple[StageProgram, ...]:
        """The stages that one rank runs, in order."""
        return tuple(self.stages[stage, tp_rank] for stage in self.plan.stages_of(pp_rank))
