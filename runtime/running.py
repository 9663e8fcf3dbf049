"""RunningProgram: what a user holds after launch. Every method that computes or moves tensors is collective.

One train step:

    agree       cut the batch, check it, and raise on all ranks if any rank has a problem
    buffers     those of dp rank 0 go to the other dp ranks
    pipeline    the rank's actions; the last backward reduces the gradients over dp
    partial     sums over tp of gradients that each rank has in part
    loss        the same number on every rank
    optimizer   clip, step

The loss is the mean over the samples of all dp ranks, and gradients are of that: with equal batches on all dp ranks
they are the mean of the ranks' gradients, as DDP's are; with unequal ones a sample still counts as much as any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import ops, schedules
from snnpart.errors import ConfigError, LaunchError
from snnpart.graph import SpikeGraph
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from snnpart.runtime import microbatch
from snnpart.runtime.collectives import GroupCollectives
from snnpart.runtime.data_parallel import broadcast_buffers, data_parallel
from snnpart.runtime.gradients import PartialGradients, clip
from snnpart.runtime.outputs import share
from snnpart.runtime.pipeline import Part, Pipeline
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.signatures import Signatures, Specialise
from snnpart.runtime.stage import Stage
from snnpart.runtime.state import FullState

LossFn = Callable[..., Tensor]
_log = logging.getLogger("snnpart")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a program runs; see `launch.launch`."""

    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    clip_grad_norm: float | None = None
    target_dim: int = 0
    check_inputs: bool = True


class RunningProgram:
    """A launched program on this rank."""

    def __init__(
        self,
        compiled: CompiledProgram,
        ranks: Ranks,
        values: Mapping[str, Tensor],
        settings: Settings,
        specialise: Specialise | None,
    ) -> None:
        """Use `launch`. `values` holds the full tensors by the user's names."""
        self.compiled, self.ranks, self._settings = compiled, ranks, settings
        at = ranks.at
        self._stage = Stage(compiled.of_rank(at.pp, at.tp), values, ranks.device, split=_splits(compiled.plan))
        self._stage.share_seed(ranks)
        self._signatures = Signatures(compiled, self._stage, at.tp, specialise)
        self._parallel = data_parallel(compiled.plan, self._stage, ranks.axes["dp"])
        self._partial = PartialGradients(self._stage, ranks)
        self._state = FullState(compiled, self._stage, ranks, values)
        self._collectives = GroupCollectives(ranks.axes)
        self._closed = False
        self.training = True
        self.grad_norm: float | None = None
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None without a factory, or on a stage with nothing to learn."""
        learned = [p for p in self.parameters() if p.requires_grad]
        if self._settings.optimizer is None or not learned:
            return None
        made = self._settings.optimizer(learned)
        if not isinstance(made, torch.optim.Optimizer) or isinstance(made, torch.optim.LBFGS):
            raise ConfigError(
                f"optimizer= gave a {type(made).__name__}, not an optimizer whose step() needs no closure",
                fix="pass a factory: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
            )
        return made

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn) -> Tensor:
        """One step on this dp rank's batch; the same loss on every rank, a 0-dim tensor.

        With an optimizer this is the whole step; without, gradients are left accumulated, as `backward` does, and
        `zero_grad` clears them.

        Args:
            inputs: as the network takes them: a tensor, a tuple of positional or a dict of keyword arguments.
            targets: tensors (nested) with the batch at `target_dim`; handed to loss_fn in microbatches.
            loss_fn: `loss_fn(outputs, targets)`, the mean over samples.

        Raises:
            ConfigError, LaunchError: on every rank, before any communication, when a rank's batch cannot be used.
        """
        parts, _ = self._cut(inputs, targets, self.training)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._start(self.training)
        self._partial.begin()
        loss = lambda outputs, part: loss_fn(microbatch.structured(outputs, self._source(part)), part.targets)  # noqa: E731
        pipeline = Pipeline(self.ranks, self.compiled.plan, self._stage, self._parallel, parts, loss)
        with ops.use_collectives(self._collectives):
            pipeline.run(self.compiled.schedule)
        self._parallel.finish()
        self._partial.finish()
        self._parallel.rest()
        total = self._same_everywhere(pipeline.total / self.ranks.mesh.dp)
        self._update()
        return total

    def _update(self) -> None:
        if self._settings.clip_grad_norm is not None:
            self.grad_norm = clip(self._stage, self.ranks, self._settings.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()

    def eval_step(self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None) -> Any:
        """The network's outputs for this dp rank's batch in eval mode, in the user's structure, on every rank.

        With `loss_fn` the result is `(outputs, loss)`; the loss is the mean over the samples of all dp ranks. A batch
        smaller than the number of microbatches is run in fewer.
        """
        parts, share_of_all = self._cut(inputs, None, training=False)
        self._start(training=False)
        pipeline = Pipeline(self.ranks, self.compiled.plan, self._stage, self._parallel, parts)
        with torch.no_grad(), ops.use_collectives(self._collectives):
            pipeline.run(self.compiled.schedule)
        self._parallel.rest()
        sizes, source = [part.size for part in parts], self._source(parts[0])
        made = [pipeline.outputs[i] for i in sorted(pipeline.outputs)]
        merged = microbatch.merge(made, source, sizes) if made else []
        outputs = microbatch.structured(share(merged, self.ranks, self._last), source)
        if loss_fn is None:
            return outputs
        with torch.no_grad():
            loss = loss_fn(outputs, self._to_device(targets))
        return outputs, self._same_everywhere(loss * share_of_all)

    def _cut(self, inputs: Any, targets: Any, training: bool) -> tuple[list[Part], float]:
        """This rank's microbatches, agreed with the others, and this dp rank's share of all samples."""
        if self._closed:
            raise LaunchError("the program was closed", fix="launch it again")
        problem: Exception | None = None
        parts: list[Part] = []
        try:
            parts = self._parts(inputs, targets, training)
        except Exception as error:  # the user's own too: what stops one rank must stop all before they communicate
            problem = error
        counts = self.ranks.at.pp == 0 and self.ranks.at.tp == 0
        size = sum(part.size for part in parts)
        (total,) = self.ranks.agree(problem, [float(size if counts else 0)])
        dp = self.ranks.mesh.dp
        return [part.weighing(part.size * dp / total) for part in parts], size / total

    def _parts(self, inputs: Any, targets: Any, training: bool) -> list[Part]:
        infos = self.compiled.source.inputs
        tensors = [x.to(self.ranks.device) for x in microbatch.tensors_of(inputs, infos)]
        if self._settings.check_inputs:
            _check_finite(tensors, [info.name for info in infos])
        batch, count = microbatch.batch_size(tensors, infos), self.compiled.plan.microbatches
        sizes = microbatch.part_sizes(batch, min(count, max(batch, 1)))
        cut = [microbatch.split(x, info.batch_dim, sizes) for info, x in zip(infos, tensors, strict=True)]
        goals = microbatch.split_nested(self._to_device(targets), self._settings.target_dim, sizes)
        parts = []
        for i, (size, goal) in enumerate(zip(sizes, goals, strict=True)):
            mine = [pieces[i] for pieces in cut]
            parts.append(Part(size, 1.0, self._signatures.bound(inputs, mine, training), mine, goal))
        return parts

    def _start(self, training: bool) -> None:
        """Common start of every pass: the mode, and dp rank 0's buffers everywhere."""
        self._stage.module.train(training)
        broadcast_buffers(self._stage, self.ranks.axes["dp"])

    def _same_everywhere(self, loss: float | Tensor) -> Tensor:
        """The sum over dp of the last stages' numbers, bit-equal on all ranks."""
        at = self.ranks.at
        counts = at.tp == 0 and at.pp == self._last
        (total,) = self.ranks.sum([float(loss) if counts else 0.0])
        return torch.tensor(total, dtype=torch.float64)

    @property
    def _last(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self.compiled.plan.rank_of(self.compiled.plan.stage_count - 1)

    def _source(self, part: Part) -> SpikeGraph:
        """The network that a microbatch's graphs were lowered from."""
        return next(iter(part.bound.values())).source

    def _to_device(self, data: Any) -> Any:
        return pytree.tree_map(lambda x: x.to(self.ranks.device) if isinstance(x, Tensor) else x, data)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters: its stage's, its slices, under the user's names."""
        return self._stage.parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers and constants under the user's names."""
        return self._stage.buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """Full tensors on the CPU under the user's names, the same on every rank."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's slices from full tensors under the user's names.

        Raises:
            CheckpointError: keys or shapes do not fit; nothing is changed then.
        """
        self._state.load(state, strict)

    def gradients(self) -> dict[str, Tensor]:
        """The full gradients under the user's names, of every parameter that has one."""
        return self._state.gradients()

    @property
    def notices(self) -> Sequence[str]:
        """What a user should know: weights taken from rank 0, graphs compiled again."""
        return self._signatures.notices

    def notice(self, text: str) -> None:
        """Record a notice and log it."""
        self._signatures.notices.append(text)
        _log.info(text)

    def train(self, mode: bool = True) -> RunningProgram:
        """The mode of `train_step` (with eval, BatchNorm keeps its statistics and dropout is off)."""
        self.training = mode
        return self

    def eval(self) -> RunningProgram:
        """`train(False)`. `eval_step` is always in eval mode."""
        return self.train(False)

    def reset(self) -> None:
        """Drop all neuron state. Steps do so themselves, before and after every microbatch."""
        self._stage.reset()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put buffers, gradients and mode back when the block is left: for checks that must leave no trace.

        Steps inside clip no gradient and update no parameter.
        """
        buffers = [(buffer, buffer.detach().clone()) for _, buffer in self.named_buffers()]
        grads, training = [(p, p.grad) for p in self.parameters()], self.training
        optimizer, self.optimizer = self.optimizer, None
        settings, self._settings = self._settings, replace(self._settings, clip_grad_norm=None)
        self.zero_grad()
        try:
            yield
        finally:
            self.training, self.optimizer, self._settings = training, optimizer, settings
            self._parallel.forget()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, grad in grads:
                parameter.grad = grad

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Give the process groups back. The program can be launched again afterwards."""
        if not self._closed:
            self._closed = True
            self.ranks.close()

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _splits(plan: Plan) -> bool:
    return schedules.KINDS[plan.schedule].splits and plan.pp > 1


def _check_finite(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    for name, x in zip(names, tensors, strict=True):
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            bad = int((~torch.isfinite(x)).sum())
            raise ConfigError(
                f"{bad} of {x.numel()} numbers are NaN or Inf",
                where=f"input '{name}'",
                fix="look at the data, or launch with check_inputs=False",
            )
