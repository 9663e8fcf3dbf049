"""Engine: what steps of a launched program work with on this rank, and what every kind of step does alike.

`training` makes train steps, `evaluation` evaluates, `execution` chooses how a train step runs; all three share this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from snnpart import ops, shared_statistics
from snnpart.errors import LaunchError
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram
from snnpart.runtime import microbatch
from snnpart.runtime.batches import Batches, on_device
from snnpart.runtime.carry import Carry
from snnpart.runtime.channels import WireTypes
from snnpart.runtime.collectives import GroupCollectives
from snnpart.runtime.data_parallel import broadcast_buffers
from snnpart.runtime.first_passes import FirstPasses
from snnpart.runtime.gradients import PartialGradients
from snnpart.runtime.heartbeat import DEVICE, Heartbeat
from snnpart.runtime.losses import Merged
from snnpart.runtime.pipeline import Part, Pipeline
from snnpart.runtime.precision import Precision
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.reduction import Alone
from snnpart.runtime.settings import Settings
from snnpart.runtime.signatures import Signatures
from snnpart.runtime.stage import Stage

LossFn = Callable[..., Tensor]


@dataclass
class Engine:
    """The parts of a launched program on this rank. `optimizer` is None without a factory or parameters."""

    compiled: CompiledProgram
    ranks: Ranks
    stage: Stage
    signatures: Signatures
    parallel: Alone
    partial: PartialGradients
    batches: Batches
    heartbeat: Heartbeat
    settings: Settings
    precision: Precision
    carry: Carry | None = None
    copies: Sequence[PartialGradients] = ()
    optimizer: torch.optim.Optimizer | None = None
    training: bool = True
    steps: int = 0
    stale: bool = True
    """Whether a train step came after the last time that all dp ranks were given dp rank 0's buffers."""
    grad_norm: float | Tensor | None = None
    closed: bool = False
    _collectives: GroupCollectives = field(init=False)
    _types: dict[bool, WireTypes] = field(init=False)
    _first_passes: FirstPasses = field(init=False, default_factory=FirstPasses)

    def __post_init__(self) -> None:
        self._types = {seen: WireTypes(seen) for seen in (False, True)}
        self._collectives = GroupCollectives(self.ranks.axes)

    @property
    def last(self) -> int:
        """The pipeline rank of the last stage."""
        return self.compiled.plan.rank_of(self.compiled.plan.stage_count - 1)

    @property
    def has_loss(self) -> bool:
        """Whether this rank's loss counts: those of a tp group are copies, other stages have none."""
        return self.ranks.at.tp == 0 and self.ranks.at.pp == self.last

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.stage.parameters())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def forget(self) -> None:
        """Forget which parameters earlier losses reached, and what is left of a step that failed."""
        self.parallel.forget()
        for one in (self.partial, *self.copies):
            one.forget()

    def begin_sums(self) -> None:
        """Before a step: gradients that are sums over ranks start anew."""
        for one in (self.partial, *self.copies):
            one.begin()

    def finish_sums(self) -> None:
        """After its backward: sum them. What `partial` put aside first is added last."""
        for one in (*self.copies, self.partial):
            with self.heartbeat.guard("reducing partial gradients", self.stage.place):
                one.finish()

    def check_open(self) -> None:
        """LaunchError after `close`, or after a step that failed."""
        if self.closed:
            raise LaunchError("the program was closed", fix="launch it again")
        if self.heartbeat.broken:
            raise LaunchError("a step failed; messages of it may still be under way", fix="close() and launch again")

    def bound_sequence(self) -> None:
        """Where a sequence begins and ends: nothing is carried over it, unless the user wants so."""
        if self.carry is not None and not self.settings.carry:
            self.carry.clear()

    def start(self, training: bool) -> None:
        """Common start of every pass: the mode, and dp rank 0's buffers everywhere."""
        self.stage.module.train(training)
        with self.heartbeat.guard("agreeing on buffers", self.stage.place, shared=True):
            broadcast_buffers(self.stage, self.ranks.axes["dp"])
        self.stale = training

    def pipeline(self, parts: Sequence[Part], loss: Callable[..., Tensor] | None = None) -> Pipeline:
        """A pass over the microbatches, to be `run`."""
        plan, stage = self.compiled.plan, self.stage
        types = self._types[self.precision.dtype is not None]
        return Pipeline(
            self.ranks, plan, stage, self.parallel, self.heartbeat, parts, self.precision, types, loss,
            first=self._first_passes.next_is_first(parts, self.training),
        )  # fmt: skip

    def run(self, pipeline: Pipeline) -> None:
        """Run all actions. After an error no gradient and no state is left; with several ranks messages may be under
        way that nobody takes any more, and the program must be launched again."""
        try:
            with ops.use_collectives(self._collectives), shared_statistics.sharing(self._total()):
                self.parallel.prepare(self.precision.dtype)
                pipeline.run(self.compiled.schedule)
        except BaseException as error:
            if not self.heartbeat.broken:  # nobody has been told
                self.heartbeat.failed(f"a pass, {self.stage.place}: {type(error).__name__}: {error}")
            self.zero_grad()
            self.stage.reset()
            self.forget()
            raise

    def _total(self) -> Callable[[Tensor], Tensor] | None:
        """The sum over dp that BatchNorm's statistics take, where they are shared."""
        if not self.settings.share_statistics or self.ranks.mesh.dp == 1:
            return None
        sums = self._collectives
        return lambda x: sums.all_reduce(sums.grad_all_reduce(x, "dp"), "dp")

    def loss_of(self, loss_fn: LossFn) -> Callable[[Sequence[Any], Part], Tensor]:
        """The user's loss as a function of a microbatch's flat outputs."""
        return lambda outputs, part: loss_fn(self.result(outputs, part), part.targets)

    def merged(self, parts: Sequence[Part], loss_fn: LossFn, targets: Any) -> Merged:
        """The loss of all microbatches at once; `targets` are on the device."""
        weight = sum(part.weight for part in parts)
        return Merged(
            source_of(parts[0]),
            [part.size for part in parts],
            lambda outputs: loss_fn(self.result(outputs, parts[0]), targets) * weight,
        )

    def result(self, outputs: Sequence[Any], part: Part) -> Any:
        """The user's structure of a microbatch's outputs."""
        return microbatch.structured(outputs, source_of(part))

    def bad_inputs(self, parts: Sequence[Part]) -> Tensor:
        """A number [] on the device, above 0 if inputs of this rank hold NaN or Inf and somebody wants to know."""
        floats = {id(x): x for part in parts for x in part.inputs if x.is_floating_point()}
        if not self.settings.check_inputs or not floats:
            return torch.zeros((), device=self.ranks.device)
        return torch.stack([(~torch.isfinite(x)).any() for x in floats.values()]).any().float()

    def to_device(self, data: Any) -> Any:
        """Nested data on this rank's device."""
        return on_device(data, self.ranks.device)

    def on_host(self, number: float | Tensor) -> float:
        """The number, for which the host waits."""
        with self.heartbeat.within(f"{DEVICE}, {self.stage.place}"):
            return float(number)

    def same_everywhere(self, loss: float | Tensor) -> Tensor:
        """The sum over dp of the last stages' numbers, bit-equal on all ranks. The host waits for the number."""
        mine = self.on_host(loss) if self.has_loss else 0.0
        with self.heartbeat.guard("agreeing on the loss", self.stage.place, shared=True):
            (total,) = self.ranks.sum([mine])
        return torch.tensor(total, dtype=torch.float64)


def source_of(part: Part) -> SpikeGraph:
    """The network that a microbatch's graphs were lowered from, with the outputs that the user knows."""
    return next(iter(part.bound.values())).source.answers()
