"""RunningProgram: what a user holds after launch. Every method that computes or moves tensors is collective.

It puts the parts of a rank together (`engine.Engine`) and hands steps on: train steps to `execution`, evaluations to
`evaluation`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.program import CompiledProgram
from snnpart.runtime.batches import Batches
from snnpart.runtime.carry import Carry
from snnpart.runtime.data_parallel import data_parallel
from snnpart.runtime.engine import Engine, LossFn
from snnpart.runtime.execution import Execution
from snnpart.runtime.gradients import carry_hooks, holders, over_copies, over_tp
from snnpart.runtime.heartbeat import Heartbeat
from snnpart.runtime.losses import MEAN
from snnpart.runtime.precision import LossScale, Precision
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.settings import Settings
from snnpart.runtime.signatures import Signatures, Specialise
from snnpart.runtime.stage import Stage
from snnpart.runtime.state import FullState

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
        self.compiled, self.ranks = compiled, ranks
        precision = Precision(settings.precision, ranks.device)
        mine = compiled.of_rank(ranks.at.pp, ranks.at.tp)
        self._stage = stage = Stage(
            mine, values, ranks.device, split=compiled.plan.splits_backward, compiles=settings.execution == "compile"
        )
        stage.share_seed(ranks)
        carry_hooks(compiled.source, stage)
        static = settings.is_static(ranks.device)
        parallel = data_parallel(compiled.plan, stage, ranks.axes["dp"], static=static)
        self._signatures = Signatures(compiled, stage, ranks.at.tp, specialise)
        stage.module.notice = self.notice
        self._partial = over_tp(stage, ranks)
        self._state = FullState(compiled, stage, ranks, values)
        if settings.carry or settings.cut is not None:
            stage.between = Carry(stage, compiled, settings.carrier)
        carry = stage.between if isinstance(stage.between, Carry) else None
        batches = Batches(compiled, ranks, self._signatures, carry, settings)
        optimizer = self._make_optimizer(settings.optimizer)
        with ExitStack() as opened:
            heartbeat = Heartbeat(ranks, settings.timeout)
            opened.callback(heartbeat.close)
            self._engine = Engine(
                compiled, ranks, stage, self._signatures, parallel, self._partial, batches, heartbeat, settings,
                precision, carry, optimizer=optimizer, copies=over_copies(stage, ranks, holders(compiled)),
            )  # fmt: skip
            self._execution = Execution(self._engine, self.notice)
            opened.pop_all()  # nothing failed: `close` ends them

    def _make_optimizer(self, factory: Callable[..., Any] | None) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None without a factory, or on a stage with nothing to learn. Collective: where one
        rank's factory fails, all raise."""
        learned = [p for p in self.parameters() if p.requires_grad]
        made, problem = None, None
        if factory is not None and learned:
            try:
                made = _checked(factory(learned))
            except Exception as error:
                problem = error
        self.ranks.agree(problem)
        return made

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None without a factory, or on a stage with nothing to learn."""
        return self._engine.optimizer

    @property
    def training(self) -> bool:
        """The mode of `train_step`."""
        return self._engine.training

    @property
    def grad_norm(self) -> float | Tensor | None:
        """The norm of all gradients before clipping, of the last step; on the device where steps are captured."""
        return self._engine.grad_norm

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn, *, reset_mask: Tensor | None = None) -> Tensor:
        """One step on this dp rank's batch; the same loss on every rank, a 0-dim tensor.

        With an optimizer this is the whole step; without, gradients are left accumulated, as `backward` does, and
        `zero_grad` clears them. With `detach_every` the loss is taken of each window and counts by its share of steps.
        Where steps are captured (see `launch(execution=)`) the loss stays on the device and nothing waits for it.

        Args:
            inputs: as the network takes them: a tensor, a tuple of positional or a dict of keyword arguments.
            targets: tensors (nested) with the batch at `target_dim`; handed to loss_fn in microbatches.
            loss_fn: `loss_fn(outputs, targets)`, the mean over samples.
            reset_mask: with `state="carry"`: bool [N], True for samples whose sequence starts anew with this step.

        Raises:
            ConfigError, LaunchError: on every rank, before any communication, when a rank's batch cannot be used.
        """
        return self._execution.train_step(inputs, targets, loss_fn, reset_mask)

    def eval_step(
        self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None, *, reset_mask: Tensor | None = None
    ) -> Any:
        """The network's outputs for this dp rank's batch in eval mode, in the user's structure, on every rank.

        With `loss_fn` the result is `(outputs, loss)`; the loss is the mean over the samples of all dp ranks. A batch
        smaller than the number of microbatches is run in fewer. `reset_mask` is that of `train_step`. What `loss_fn`
        raises on one rank is raised on all.
        """
        return self._execution.eval_step(inputs, targets, loss_fn, reset_mask)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._engine.zero_grad()

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
        self._execution.settle()
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's slices from full tensors under the user's names.

        Raises:
            CheckpointError: keys or shapes do not fit; nothing is changed then.
        """
        self._state.load(state, strict)

    def gradients(self) -> dict[str, Tensor]:
        """The full gradients under the user's names, of every parameter that has one."""
        self._execution.settle()
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
    def loss_scale(self) -> LossScale | None:
        """What the loss is multiplied by under precision="fp16"."""
        return self._engine.precision.scale

    def settle(self) -> None:
        """Wait for all train steps under way on the device, and raise what was wrong with them."""
        self._execution.settle()

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
        self._engine.training = mode
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
        carry = self._engine.carry
        if carry is None:
            return
        problem: Exception | None = None
        try:
            carry.clear() if mask is None else carry.restart(mask)
        except Exception as error:
            problem = error
        self.ranks.agree(problem)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put buffers, gradients, mode and random numbers back when the block is left: for checks that must leave no
        trace.

        Steps inside compute in full precision, neurons too, clip no gradient, update no parameter, and run what they
        are given as one window.
        """
        from snnpart.runtime.checkpoint.randomness import undisturbed  # it knows running programs

        engine = self._engine
        buffers = [(buffer, buffer.detach().clone()) for _, buffer in self.named_buffers()]
        grads, training = [(p, p.grad) for p in self.parameters()], engine.training
        optimizer, engine.optimizer = engine.optimizer, None
        precision, engine.precision = engine.precision, Precision("fp32", self.ranks.device)
        settings = engine.settings
        engine.settings = replace(
            settings, clip_grad_norm=None, reduction=MEAN, check_loss=False, cut=None, share_statistics=False
        )
        state = engine.carry.put_aside() if engine.carry is not None else None
        self._execution.paused, self._stage.module.rounds = True, False
        self.zero_grad()
        try:
            with undisturbed(self):
                yield
        finally:
            self._execution.paused, self._stage.module.rounds = False, True
            if engine.carry is not None and state is not None:
                engine.carry.put_back(state)
            engine.training, engine.optimizer, engine.settings = training, optimizer, settings
            engine.precision = precision
            engine.forget()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, grad in grads:
                parameter.grad = grad

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._engine.closed

    def close(self) -> None:
        """Give the process groups back. The program can be launched again afterwards."""
        if not self._engine.closed:
            self._engine.closed = True
            self._execution.close()
            self._engine.heartbeat.close()
            self.ranks.close()

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(made: Any) -> torch.optim.Optimizer:
    if not isinstance(made, torch.optim.Optimizer) or isinstance(made, torch.optim.LBFGS):
        raise ConfigError(
            f"optimizer= gave a {type(made).__name__}, not an optimizer whose step() needs no closure",
            fix="pass a factory: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    return made
