"""Neurons of plain PyTorch in the styles that published networks use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Box(torch.autograd.Function):
    """A step whose gradient is one within a window around the threshold."""

    @staticmethod
    def forward(ctx: Any, excess: Tensor) -> Tensor:
        ctx.save_for_backward(excess)
        return excess.ge(0).to(excess.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (excess,) = ctx.saved_tensors
        return grads[0] * excess.abs().lt(1.0).to(grads[0].dtype)


class Tent(torch.autograd.Function):
    """A triangular surrogate whose width is a tensor of its own that is saved for backward."""

    @staticmethod
    def forward(ctx: Any, excess: Tensor, width: float) -> Tensor:
        ctx.save_for_backward(excess, torch.tensor([width]))
        return excess.ge(0).to(excess.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        excess, width = ctx.saved_tensors
        return grads[0] * (width - excess.abs()).clamp(min=0).to(grads[0].dtype) / width.to(grads[0].dtype) ** 2, None


class Slope(torch.autograd.Function):
    """A sigmoid surrogate whose slope is learned."""

    @staticmethod
    def forward(ctx: Any, excess: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(excess, slope)
        return excess.ge(0).to(excess.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        excess, slope = ctx.saved_tensors
        gate = torch.sigmoid(slope * excess)
        shape = gate * (1 - gate) * grads[0]
        return shape * slope, (shape * excess).sum()


def spike(excess: Tensor) -> Tensor:
    """Spikes of the membrane's excess over the threshold."""
    out: Tensor = Box.apply(excess)  # type: ignore[no-untyped-call]
    return out


class Lif(nn.Module):
    """A neuron of one step a call, its membrane a plain attribute."""

    is_neuron = True

    def __init__(self, decay: float = 0.5, threshold: float = 0.5) -> None:
        super().__init__()
        self.decay, self.threshold = decay, threshold
        self.v: Tensor | None = None

    def reset(self) -> None:
        self.v = None

    def forward(self, x: Tensor) -> Tensor:
        v = x if self.v is None else self.decay * self.v + x
        out = spike(v - self.threshold)
        self.v = v * (1 - out.detach())
        return out
