"""A train step, eager: every check on the host before anything is sent, one number for the loss on every rank.

    agree       cut the batch, check it, and raise on all ranks if any rank has a problem
    buffers     those of dp rank 0 go to the other dp ranks
    pipeline    the rank's actions; the last backward reduces the gradients over dp
    sums        over tp, or over the stages that hold a copy, of gradients that each rank has in part
    loss        the same number on every rank
    optimizer   clip, step

The loss is the mean over the samples of all dp ranks, and gradients are of that: with equal batches on all dp ranks
they are the mean of the ranks' gradients, as DDP's are; with unequal ones a sample still counts as much as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError
from snnpart.runtime.carry import agreed_windows
from snnpart.runtime.engine import Engine, LossFn
from snnpart.runtime.gradients import clip
from snnpart.runtime.losses import LossCheck
from snnpart.runtime.pipeline import Part
from snnpart.runtime.update import NORM, Update


def train_step(
    engine: Engine, update: Update, inputs: Any, targets: Any, loss_fn: LossFn, reset_mask: Tensor | None
) -> Tensor:
    """One step on this dp rank's batch, window by window; see `RunningProgram.train_step`."""
    engine.bound_sequence()
    total = torch.zeros((), dtype=torch.float64)
    with engine.heartbeat.guard("agreeing on the windows", "start of a step", shared=True):
        windows = agreed_windows(engine.settings.cut, inputs, engine.ranks)
    for at, (window, share_of_time) in enumerate(windows):
        mask = None if at else reset_mask
        engine.check_open()
        with engine.heartbeat.guard("agreeing on the batch", "start of a step", shared=True):
            parts, _ = engine.batches.cut(window, targets, engine.training, mask, engine.settings.reduction)
        if engine.optimizer is not None and at == 0:
            engine.optimizer.zero_grad()
        timed = [part.weighing(part.weight * share_of_time) for part in parts]
        total = total + _run_window(engine, timed, loss_fn, targets)
    engine.bound_sequence()
    if engine.precision.scale is not None:
        _update_scaled(engine, update)
        return total
    if engine.settings.clip_grad_norm is not None:
        with engine.heartbeat.guard("agreeing on the norm of gradients", engine.stage.place, shared=True):
            engine.grad_norm = clip(engine.stage, engine.ranks, engine.settings.clip_grad_norm)
    if engine.optimizer is not None:
        engine.optimizer.step()
    return total


def _update_scaled(engine: Engine, update: Update) -> None:
    """Unscale, clip, step unless a gradient is not finite, and choose the next scale."""
    nothing = torch.zeros((), device=engine.ranks.device)
    with engine.heartbeat.guard("agreeing on gradients", engine.stage.place):
        report = update.report(nothing, nothing)
    update.step(report)
    update.finish(report)
    engine.grad_norm = report[NORM] if engine.settings.clip_grad_norm is not None else None


def _run_window(engine: Engine, parts: list[Part], loss_fn: LossFn, targets: Any) -> Tensor:
    """Forward and backward of all microbatches; the loss."""
    engine.start(engine.training)
    total = gradients(engine, parts, loss_fn, lambda: engine.to_device(targets))
    return engine.same_everywhere(total / engine.ranks.mesh.dp)


def gradients(engine: Engine, parts: Sequence[Part], loss_fn: LossFn, targets: Callable[[], Any]) -> Tensor | float:
    """Forward and backward of all microbatches, gradients reduced; the weighted sum of this rank's losses.

    The first step looks at the kind of the loss and at what travels as bits; the host waits for that.

    Args:
        targets: gives those of the whole batch on the device, for a loss of all microbatches together.
    """
    engine.begin_sums()
    loss, check = engine.loss_of(loss_fn), _first_look(engine, len(parts), loss_fn)
    pipeline = engine.pipeline(parts, loss if check is None else check.around(loss))
    pipeline.check = engine.steps == 0
    if engine.settings.reduction.kind == "merged":
        pipeline.merged = engine.merged(parts, loss_fn, targets())
    engine.run(pipeline)
    engine.steps += 1
    if check is not None:
        _judge(engine, check)
    with engine.heartbeat.guard("reducing gradients", engine.stage.place):
        engine.parallel.finish()
    engine.finish_sums()
    engine.parallel.rest()
    return pipeline.total


def _first_look(engine: Engine, parts: int, loss_fn: LossFn) -> LossCheck | None:
    """A check of the kind of loss for the first step, where the kind matters."""
    settings = engine.settings
    if not settings.check_loss or (parts == 1 and engine.ranks.mesh.dp == 1):
        return None
    return LossCheck(settings.reduction, loss_fn, settings.target_dim)


def _judge(engine: Engine, suspect: LossCheck) -> None:
    """Raise on every rank if the first loss is not of the kind that was said; its gradients are forgotten."""
    try:
        with engine.heartbeat.guard("agreeing on the kind of loss", engine.stage.place):
            engine.ranks.agree(suspect.problem)
    except ConfigError:
        engine.zero_grad()
        engine.forget()
        raise
    engine.settings = replace(engine.settings, check_loss=False)
