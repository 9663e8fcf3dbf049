"""Precision of a step: autocast around forward and loss, and for fp16 a loss scale that lives on the device.

    fp32    what the tensors say (float64 networks compute in float64)
    bf16    torch.autocast to bfloat16, on CUDA and on the CPU
    fp16    torch.autocast to float16, and the loss is scaled so that small gradients do not vanish

The scale is the seed of the backward pass, so that losses are reported unscaled. It follows torch's GradScaler: halved
after a step whose gradients hold Inf or NaN (such a step changes no parameter), doubled after `interval` good ones.
Whether a gradient was bad is summed over all ranks before anything looks at it, so that every rank has the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from snnpart import compat

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale:
    """The factor of the loss on one device, equal on all ranks."""

    def __init__(self, device: torch.device, start: float = 2.0**16, interval: int = 2000) -> None:
        self.factor = torch.full((), start, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._interval = interval

    def unscale(self, grads: Sequence[Tensor], bad: Tensor) -> None:
        """Divide the gradients by the factor, in place; `bad` [] becomes 1 where one is not finite."""
        inverse = self.factor.double().reciprocal().float()
        for dtype in {grad.dtype for grad in grads}:
            compat.unscale([grad for grad in grads if grad.dtype is dtype], bad, inverse)

    def update(self, bad: Tensor, undo: Tensor) -> None:
        """Choose the next factor; `bad` [] is 0 after a good step. Nothing changes where `undo` [] is above 0."""
        held = [self.factor, self._good]
        before = compat.copies(held)
        compat.update_scale(self.factor, self._good, bad, interval=self._interval)
        compat.put_back(held, before, undo)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": float(self.factor), "good": int(self._good)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor.fill_(state["factor"])
        self._good.fill_(state["good"])


class Precision:
    """How this rank computes."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name` of `DTYPES`."""
        self.name, self.dtype, self._device = name, DTYPES[name], device
        self.scale = LossScale(device) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """A block that computes in the chosen precision."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def seed(self, loss: Tensor) -> Tensor | None:
        """The gradient of the loss that backward starts with; None: 1."""
        return None if self.scale is None else self.scale.factor.to(loss.dtype).expand_as(loss)
