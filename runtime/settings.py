"""How a launched program runs, as `launch` was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from snnpart.errors import ConfigError
from snnpart.runtime.carry import Carrier
from snnpart.runtime.losses import MEAN, Reduction
from snnpart.runtime.precision import DTYPES
from snnpart.windows import Cut

MODES = ("auto", "eager", "compile", "cuda_graph")


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
    share_statistics: bool = False
    carry: bool = False
    cut: Cut | None = None
    carrier: Carrier | None = None
    execution: str = "auto"
    precision: str = "fp32"

    @property
    def why_eager(self) -> str:
        """Why no train step can be a static one; empty when one can."""
        if self.optimizer is None:
            return "without optimizer= gradients accumulate over steps"
        if self.carry or self.cut is not None:
            return "neuron state goes from one forward to the next"
        return ""

    def is_static(self, device: torch.device) -> bool:
        """Whether train steps are static ones (see `execution`)."""
        return self._asks_for_static(device) and not self.why_eager

    def evaluates_static(self, device: torch.device) -> bool:
        """Whether evaluations are static passes."""
        return self._asks_for_static(device) and not self.carry and self.cut is None

    def _asks_for_static(self, device: torch.device) -> bool:
        return self.execution == "cuda_graph" or (self.execution == "auto" and device.type == "cuda")

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigError(
                f"clip_grad_norm={self.clip_grad_norm!r} is not a positive number", fix="leave it out not to clip"
            )
        if self.optimizer is not None and not callable(self.optimizer):
            raise ConfigError(
                f"optimizer is a {type(self.optimizer).__name__}, not a factory: each rank makes one for its own "
                "parameters",
                fix="pass optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
            )
        if self.execution not in MODES:
            raise ConfigError(f"execution={self.execution!r} is not known", choices=MODES)
        if self.precision not in DTYPES:
            raise ConfigError(f"precision={self.precision!r} is not known", choices=DTYPES)
        if self.reduction.kind == "merged" and (self.carry or self.cut is not None):
            raise ConfigError(
                'loss_reduction="merged" cannot be had with state that is carried or with detach_every',
                fix="give the weight of a microbatch as a function of its targets",
            )
