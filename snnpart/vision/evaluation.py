"""Evaluation: loss and accuracy over every sample once, whatever the number of samples and ranks.

A mean over samples cannot be summed; so the loss of a batch's rows that count is taken as mean times rows. For a loss
that is no mean over samples (weights of classes) give loss_kwargs with reduction = "sum" in a loss of your own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart.vision import build
from snnpart.vision.config import EvaluationConfig
from snnpart.vision.logs import Steps, open_log
from snnpart.vision.metrics import Sums, peak_bytes
from snnpart.vision.session import Session, class_count, opened
from snnpart.vision.weights import weights_of


def evaluate(config: EvaluationConfig) -> dict[str, Any]:
    """Evaluate on the ranks torchrun started; without it, on this process.

    Returns:
        on every rank: loss, top1, top5 (shares), samples, images_per_second, peak_bytes (of the busiest rank).

    Raises:
        ConfigError, CheckpointError, LaunchError: on every rank.
    """
    config, model = weights_of(config)
    data = build.make_data(config)
    part = data.training if config.split == "train" else data.validation
    with opened(config, part, config.split, model) as session:
        log = open_log(session.running.ranks, config.log)
        found = score(session, part, build.make_loss(config))
        log.metrics({"event": "evaluation", **found})
        return found


def score(session: Session, data: Any, loss: Callable[..., Tensor]) -> dict[str, Any]:
    """Loss, accuracy and speed over all samples of `data`. Collective."""
    samples = session.samples(data)
    loader, classes = session.loader(samples), class_count(session.running.compiled)
    sums, started = Sums(), time.perf_counter()
    with Steps("evaluation", len(loader), session.running.ranks.rank == 0) as steps:
        for batch in session.batches(loader, classes):
            logits = wide(session.logits(session.running.eval_step(batch.inputs)))
            if batch.real and session.reports:
                rows, targets = counted_rows((logits, batch.targets), batch.counted.to(logits.device))
                with torch.no_grad():
                    sums.add(rows, targets, loss(rows, targets) * len(rows))
            steps.advance()
    ranks = session.running.ranks
    found: Mapping[str, float] = sums.over_ranks(ranks, session.reports)
    seconds = max(ranks.gather(time.perf_counter() - started))
    return {
        **found,
        "samples": int(found["samples"]),
        "images_per_second": found["samples"] / seconds,
        "peak_bytes": peak_bytes(ranks),
    }


def wide(logits: Tensor) -> Tensor:
    """Logits that autocast made as float32, in which the loss of a batch is not rounded to three digits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def counted_rows(tree: Any, counted: Tensor) -> Any:
    """The rows that count of every tensor in it, on the device of `counted`."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(counted.device)[counted], tree)
