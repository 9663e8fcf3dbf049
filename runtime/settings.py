"""How a launched program runs, as `launch` was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from snnpart.runtime.carry import Carrier
from snnpart.runtime.losses import MEAN, Reduction
from snnpart.windows import Cut


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a program runs; see `launch.launch`."""

    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    clip_grad_norm: float | None = None
    target_dim: int = 0
    reduction: Reduction = MEAN
    check_loss: bool = True
    timeout: timedelta = timedelta(minutes=10)
    check_inputs: bool = True
    carry: bool = False
    cut: Cut | None = None
    carrier: Carrier | None = None
