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
        with engine.heartbeat.guard("agreeing on the windows", "start of an evaluation", shared=True):
            windows = [window for window, _ in agreed_windows(cut, inputs, engine.ranks)]
        pairs = [_evaluate(engine, window, None if at else reset_mask) for at, window in enumerate(windows)]
        outputs, share_of_all = joined([out for out, _ in pairs]), pairs[0][1]
    engine.bound_sequence()
    return judged(engine, outputs, targets, loss_fn, share_of_all)


def judged(engine: Engine, outputs: Any, targets: Any, loss_fn: LossFn | None, share_of_all: float) -> Any:
    """The outputs, with `loss_fn` also the loss over all dp ranks; `share_of_all` of the samples are this rank's.

    Raises:
        Exception: on every rank what `loss_fn` raised on one; nobody waits for it then.
    """
    if loss_fn is None:
        return outputs
    problem: Exception | None = None
    mine = [0.0, 0.0]
    try:
        with engine.heartbeat.within("the loss, an evaluation"):
            mine = _own_loss(engine, outputs, engine.to_device(targets), loss_fn, share_of_all)
    except Exception as error:  # the user's own: what stops one rank must stop all before they communicate
        problem = error
    with engine.heartbeat.guard("agreeing on the loss", engine.stage.place, shared=True):
        total, weights = engine.ranks.agree(problem, mine)
    if engine.settings.reduction.kind == "weights":
        total = total / weights if weights else 0.0
    return outputs, torch.tensor(total, dtype=torch.float64)


def _own_loss(engine: Engine, outputs: Any, targets: Any, loss_fn: LossFn, share_of_all: float) -> list[float]:
    """What this rank adds to the loss of all, and to the weights of all; nothing where its loss does not count."""
    reduction = engine.settings.reduction
    with torch.no_grad(), engine.precision.autocast():
        loss = loss_fn(outputs, targets)
    weight = reduction.weight(0, targets) if reduction.kind == "weights" else 0.0
    factor = {"sum": 1.0, "weights": weight}.get(reduction.kind, share_of_all)
    if not engine.has_loss:
        return [0.0, 0.0]
    return [engine.on_host(loss * factor) if factor else 0.0, weight]


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
    with engine.heartbeat.guard("sharing outputs", engine.stage.place):
        kinds = kinds_of(merged, engine.ranks, engine.last)
        shared = share(merged, engine.ranks, engine.last, kinds)
    return microbatch.structured(shared, source), share_of_all
