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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from snnpart import ops
from snnpart.errors import ConfigError, LaunchError
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram
from snnpart.runtime import microbatch
from snnpart.runtime.batches import Batches, on_device
from snnpart.runtime.carry import Carry, agreed_windows
from snnpart.runtime.collectives import GroupCollectives
from snnpart.runtime.data_parallel import broadcast_buffers, data_parallel
from snnpart.runtime.gradients import PartialGradients, clip
from snnpart.runtime.heartbeat import Heartbeat
from snnpart.runtime.losses import MEAN, LossCheck, Merged
from snnpart.runtime.outputs import share
from snnpart.runtime.pipeline import Part, Pipeline
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.settings import Settings
from snnpart.runtime.signatures import Signatures, Specialise
from snnpart.runtime.stage import Stage
from snnpart.runtime.state import FullState
from snnpart.windows import joined

LossFn = Callable[..., Tensor]
_log = logging.getLogger("snnpart")


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
        mine = compiled.of_rank(ranks.at.pp, ranks.at.tp)
        self._stage = Stage(mine, values, ranks.device, split=compiled.plan.splits_backward)
        self._stage.share_seed(ranks)
        self._signatures = Signatures(compiled, self._stage, ranks.at.tp, specialise)
        self._parallel = data_parallel(compiled.plan, self._stage, ranks.axes["dp"])
        self._partial = PartialGradients(self._stage, ranks)
        self._state = FullState(compiled, self._stage, ranks, values)
        self._collectives = GroupCollectives(ranks.axes)
        self._carry: Carry | None = None
        if settings.carry or settings.cut is not None:
            self._stage.between = self._carry = Carry(self._stage, compiled, settings.carrier)
        self._batches = Batches(compiled, ranks, self._signatures, self._carry, settings)
        self._heartbeat = Heartbeat(ranks, settings.timeout)
        self._closed = self._broken = False
        self._steps = 0
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

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn, *, reset_mask: Tensor | None = None) -> Tensor:
        """One step on this dp rank's batch; the same loss on every rank, a 0-dim tensor.

        With an optimizer this is the whole step; without, gradients are left accumulated, as `backward` does, and
        `zero_grad` clears them. With `detach_every` the loss is taken of each window and counts by its share of steps.

        Args:
            inputs: as the network takes them: a tensor, a tuple of positional or a dict of keyword arguments.
            targets: tensors (nested) with the batch at `target_dim`; handed to loss_fn in microbatches.
            loss_fn: `loss_fn(outputs, targets)`, the mean over samples.
            reset_mask: with `state="carry"`: bool [N], True for samples whose sequence starts anew with this step.

        Raises:
            ConfigError, LaunchError: on every rank, before any communication, when a rank's batch cannot be used.
        """
        self._bound_sequence()
        total = torch.zeros((), dtype=torch.float64)
        for at, (window, share_of_time) in enumerate(agreed_windows(self._settings.cut, inputs, self.ranks)):
            mask = None if at else reset_mask
            self._check_open()
            with self._heartbeat.guard("agreeing on the batch", "start of a step", shared=True):
                parts, _ = self._batches.cut(window, targets, self.training, mask, self._settings.reduction)
            if self.optimizer is not None and at == 0:
                self.optimizer.zero_grad()
            timed = [part.weighing(part.weight * share_of_time) for part in parts]
            total = total + self._run_window(timed, loss_fn, targets)
        self._bound_sequence()
        self._update()
        return total

    def _run_window(self, parts: list[Part], loss_fn: LossFn, targets: Any) -> Tensor:
        """Forward and backward of all microbatches; the loss."""
        self._start(self.training)
        self._partial.begin()
        loss = lambda outputs, part: loss_fn(self._result(outputs, part), part.targets)  # noqa: E731
        reduction = self._settings.reduction
        suspect = LossCheck(reduction, loss_fn, self._settings.target_dim) if self._judges(parts) else None
        pipeline = Pipeline(self.ranks, self.compiled.plan, self._stage, self._parallel, self._heartbeat, parts, loss)
        pipeline.check = self._steps == 0
        if suspect is not None:
            pipeline.loss = suspect.around(loss)
        if reduction.kind == "merged":
            pipeline.merged = self._merged(parts, loss_fn, targets)
        self._run(pipeline)
        self._steps += 1
        if suspect is not None:
            self._judge(suspect)
        self._parallel.finish()
        self._partial.finish()
        self._parallel.rest()
        return self._same_everywhere(pipeline.total / self.ranks.mesh.dp)

    def _run(self, pipeline: Pipeline) -> None:
        """Run all actions. After an error no gradient and no state is left; with several ranks messages may be under
        way that nobody takes any more, and the program must be launched again."""
        try:
            with ops.use_collectives(self._collectives):
                pipeline.run(self.compiled.schedule)
        except BaseException:
            self._broken = self.ranks.mesh.size > 1
            self.zero_grad()
            self._stage.reset()
            self._parallel.forget()
            raise

    def _judges(self, parts: Sequence[Part]) -> bool:  # the first step, where the kind of loss matters
        return self._settings.check_loss and (len(parts) > 1 or self.ranks.mesh.dp > 1)

    def _judge(self, suspect: LossCheck) -> None:
        """Raise on every rank if the first loss is not of the kind that was said; its gradients are forgotten."""
        try:
            self.ranks.agree(suspect.problem)
        except ConfigError:
            self.zero_grad()
            self._parallel.forget()
            raise
        self._settings = replace(self._settings, check_loss=False)

    def _merged(self, parts: Sequence[Part], loss_fn: LossFn, targets: Any) -> Merged:
        """The loss of all microbatches at once."""
        weight, goal = sum(part.weight for part in parts), self._to_device(targets)
        return Merged(
            self._source(parts[0]),
            [part.size for part in parts],
            lambda outputs: loss_fn(self._result(outputs, parts[0]), goal) * weight,
        )

    def _result(self, outputs: Sequence[Any], part: Part) -> Any:
        """The user's structure of a microbatch's outputs; hand-written state that comes with them is kept."""
        value = microbatch.structured(outputs, self._source(part))
        if self._carry is None or self._carry.carrier is None:
            return value
        result, states = value
        self._carry.keep_slots(part.number, states)
        return result

    def _bound_sequence(self) -> None:
        """Where a sequence begins and ends: nothing is carried over it, unless the user wants so."""
        if self._carry is not None and not self._settings.carry:
            self._carry.clear()

    def _update(self) -> None:
        if self._settings.clip_grad_norm is not None:
            self.grad_norm = clip(self._stage, self.ranks, self._settings.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()

    def eval_step(
        self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None, *, reset_mask: Tensor | None = None
    ) -> Any:
        """The network's outputs for this dp rank's batch in eval mode, in the user's structure, on every rank.

        With `loss_fn` the result is `(outputs, loss)`; the loss is the mean over the samples of all dp ranks. A batch
        smaller than the number of microbatches is run in fewer. `reset_mask` is that of `train_step`.
        """
        self._bound_sequence()
        cut = self._settings.cut
        if cut is None or cut.steps is None:
            outputs, share_of_all = self._evaluate(inputs, reset_mask)
        else:
            windows = [window for window, _ in agreed_windows(cut, inputs, self.ranks)]
            pairs = [self._evaluate(window, None if at else reset_mask) for at, window in enumerate(windows)]
            outputs, share_of_all = joined([out for out, _ in pairs]), pairs[0][1]
        self._bound_sequence()
        if loss_fn is None:
            return outputs
        with torch.no_grad():
            loss = loss_fn(outputs, self._to_device(targets))
        return outputs, self._over_all(loss, targets, share_of_all)

    def _over_all(self, loss: Tensor, targets: Any, share_of_all: float) -> Tensor:
        """The loss over all dp ranks from each one's."""
        reduction = self._settings.reduction
        if reduction.kind == "weights":
            weight = reduction.weight(0, self._to_device(targets))
            everyone = float(self._same_everywhere(weight))
            share_of_all = weight / everyone if everyone else 0.0
        if reduction.kind == "sum":
            share_of_all = 1.0
        return self._same_everywhere(loss * share_of_all if share_of_all else 0.0)

    def _evaluate(self, inputs: Any, reset_mask: Tensor | None) -> tuple[Any, float]:
        """Outputs in the user's structure, and this dp rank's share of all samples."""
        self._check_open()
        with self._heartbeat.guard("agreeing on the batch", "start of an evaluation", shared=True):
            parts, share_of_all = self._batches.cut(inputs, None, False, reset_mask)
        self._start(training=False)
        pipeline = Pipeline(self.ranks, self.compiled.plan, self._stage, self._parallel, self._heartbeat, parts)
        with torch.no_grad():
            self._run(pipeline)
        self._parallel.rest()
        sizes, source = [part.size for part in parts], self._source(parts[0])
        made = [pipeline.outputs[i] for i in sorted(pipeline.outputs)]
        merged = microbatch.merge(made, source, sizes) if made else []
        outputs = microbatch.structured(share(merged, self.ranks, self._last), source)
        if self._carry is not None and self._carry.carrier is not None:
            for part in parts:
                self._result(pipeline.outputs[part.number], part)
            outputs = outputs[0]
        return outputs, share_of_all

    def _check_open(self) -> None:
        if self._closed:
            raise LaunchError("the program was closed", fix="launch it again")
        if self._broken:
            raise LaunchError("a step failed; messages of it may still be under way", fix="close() and launch again")

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
        return on_device(data, self.ranks.device)

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
    def stage(self) -> Stage:
        """This rank's part of the network."""
        return self._stage

    @property
    def full_state(self) -> FullState:
        """The network's tensors, whole."""
        return self._state

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

    def reset(self, mask: Tensor | None = None) -> None:
        """Drop neuron state. Steps do so themselves, unless state is carried between them.

        Args:
            mask: bool [N], True for samples of this dp rank's batch whose sequence ends here. Default: all.
        """
        self._stage.reset()
        if self._carry is None:
            return
        problem: Exception | None = None
        try:
            self._carry.clear() if mask is None else self._carry.restart(mask)
        except Exception as error:
            problem = error
        self.ranks.agree(problem)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put buffers, gradients and mode back when the block is left: for checks that must leave no trace.

        Steps inside clip no gradient, update no parameter, and run what they are given as one window.
        """
        buffers = [(buffer, buffer.detach().clone()) for _, buffer in self.named_buffers()]
        grads, training = [(p, p.grad) for p in self.parameters()], self.training
        optimizer, self.optimizer = self.optimizer, None
        settings, self._settings = (
            self._settings,
            replace(self._settings, clip_grad_norm=None, reduction=MEAN, check_loss=False, cut=None),
        )
        state = self._carry.put_aside() if self._carry is not None else None
        self.zero_grad()
        try:
            yield
        finally:
            if self._carry is not None and state is not None:
                self._carry.put_back(state)
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
            self._heartbeat.close()
            self.ranks.close()

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
