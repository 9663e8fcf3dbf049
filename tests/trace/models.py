"""Small hand-written networks for the tracer's tests, in float64, with deterministic numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def data(*shape: int, k: float = 0.7) -> Tensor:
    """Deterministic numbers in (-1, 1)."""
    count = int(torch.Size(shape).numel())
    return torch.sin(torch.arange(count, dtype=torch.float64) * k + 0.3).reshape(shape)


def fill(model: nn.Module, k: float = 0.37, scale: float = 0.9) -> nn.Module:
    """The model in float64 with deterministic parameters."""
    model.double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.dim():
                parameter.copy_(data(*parameter.shape, k=k + 0.01 * i) * scale)
    return model


class Spike(torch.autograd.Function):
    """Triangular surrogate, ctx style."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad * (1 - u.abs()).clamp(min=0)


class LIF(nn.Module):
    """A neuron without a framework; its state lies on the module."""

    def __init__(self, decay: float = 0.5, vth: float = 0.3) -> None:
        super().__init__()
        self.decay, self.vth = decay, vth
        self.v: Tensor | None = None

    def reset(self) -> None:
        self.v = None

    def forward(self, x: Tensor) -> Tensor:
        v = x if self.v is None else self.decay * self.v + x
        z = Spike.apply(v - self.vth)
        self.v = v * (1 - z.detach())
        return z
