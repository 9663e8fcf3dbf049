"""An evaluation: forward passes in eval mode, outputs on every rank of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnpart.runtime import microbatch
from snnpart.runtime.carry import agreed_windows
from snnpart.runtime.engine import Engine, LossFn, source_of
from snnpart.runtime.outputs import kinds_of, share
from snnpart.windows import joined


def evaluate(engine: Engine, inputs: Any, targets: Any, loss_fn: LossFn | None, reset_mask: Tensor | None) -> Any:
    """Outputs for this dp rank's batch, with `loss_fn` also the loss of all; see `RunningProgram.eval_step`."""
    engine.bound_sequence()
    cut = engine.settings.cut
    if cut is None or cut.steps is None:
        outputs, share_of_all = _evaluate(engine, inputs, reset_mask)
    else:
        windows = [window for window, _ in agreed_windows(cut, inputs, engine.ranks)]
        pairs = [_evaluate(engine, window, None if at else reset_mask) for at, window in enumerate(windows)]
        outputs, share_of_all = joined([out for out, _ in pairs]), pairs[0][1]
    engine.bound_sequence()
    return judged(engine, outputs, targets, loss_fn, share_of_all)


def judged(engine: Engine, outputs: Any, targets: Any, loss_fn: LossFn | None, share_of_all: float) -> Any:
    """The outputs, with `loss_fn` also the loss over all dp ranks; `share_of_all` of the samples are this rank's."""
    if loss_fn is None:
        return outputs
    with torch.no_grad(), engine.precision.autocast():
        loss = loss_fn(outputs, engine.to_device(targets))
    return outputs, _over_all(engine, loss, targets, share_of_all)


def _over_all(engine: Engine, loss: Tensor, targets: Any, share_of_all: float) -> Tensor:
    """The loss over all dp ranks from each one's."""
    reduction = engine.settings.reduction
    if reduction.kind == "weights":
        weight = reduction.weight(0, engine.to_device(targets))
        everyone = float(engine.same_everywhere(weight))
        share_of_all = weight / everyone if everyone else 0.0
    if reduction.kind == "sum":
        share_of_all = 1.0
    return engine.same_everywhere(loss * share_of_all if share_of_all else 0.0)


def _evaluate(engine: Engine, inputs: Any, reset_mask: Tensor | None) -> tuple[Any, float]:
    """Outputs in the user's structure, and this dp rank's share of all samples."""
    engine.check_open()
    with engine.heartbeat.guard("agreeing on the batch", "start of an evaluation", shared=True):
        parts, share_of_all = engine.batches.cut(inputs, None, False, reset_mask)
    engine.start(training=False)
    pipeline = engine.pipeline(parts)
    with torch.no_grad():
        engine.run(pipeline)
    engine.parallel.rest()
    sizes, source = [part.size for part in parts], source_of(parts[0])
    made = [pipeline.outputs[i] for i in sorted(pipeline.outputs)]
    merged = microbatch.merge(made, source, sizes) if made else []
    kinds = kinds_of(merged, engine.ranks, engine.last)
    return microbatch.structured(share(merged, engine.ranks, engine.last, kinds), source), share_of_all
