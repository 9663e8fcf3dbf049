"""Steps with losses that are no plain means over samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.errors import SnnpartError
from snnpart.runtime.launch import launch
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.jobs import dp_share

WEIGHT = torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)
IGNORED = -100


def weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=WEIGHT)


def ignoring(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, ignore_index=IGNORED)


def summed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def spread(out: Tensor, y: Tensor) -> Tensor:
    """No sum over samples at all: how unlike the samples of a batch are."""
    return out.var(0).sum() + F.cross_entropy(out, y)


LOSSES = {"weighted": weighted, "ignoring": ignoring, "summed": summed, "spread": spread, "mean": F.cross_entropy}
WEIGHTS = {"weighted": lambda y: WEIGHT[y].sum(), "ignoring": lambda y: (y != IGNORED).sum()}


def targets(loss: str) -> Tensor:
    """Of ten samples. With three microbatches the last one of `ignoring` holds no sample that counts."""
    y = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1, 0, 1])
    return torch.where(torch.arange(10) < 6, y, IGNORED) if loss == "ignoring" else y


def run_loss(name: str, loss: str, reduction: str, **topology: Any) -> dict[str, Any]:
    """One train step and one evaluation of a case's first input with another loss."""
    case, y = CASES[name], targets(loss)
    x = case.batches()[0][0]
    asked = WEIGHTS[loss] if reduction == "weights" else reduction
    try:
        running = launch(compile_case(case, **topology), loss_reduction=asked)
    except SnnpartError as error:
        return {"error": str(error)}
    mine = dp_share(x, 0, running.ranks), dp_share(y, 0, running.ranks)
    try:
        value = running.train_step(*mine, LOSSES[loss]).item()
    except SnnpartError as error:
        return {"error": str(error), "gradients": running.gradients()}
    result = {"loss": value, "gradients": running.gradients(), "eval": running.eval_step(*mine, LOSSES[loss])[1].item()}
    running.close()
    return result
