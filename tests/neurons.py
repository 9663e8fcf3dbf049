"""What hand-written networks of the tests are made of: numbers without a random generator, surrogates, neurons.

Worker processes import this module by name, so it imports nothing but torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def data(*shape: int, k: float = 0.7) -> Tensor:
    """Deterministic numbers in (-1, 1), in float64."""
    count = torch.Size(shape).numel()
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
    """A step forward, a triangle backward."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        return grads[0] * (1 - u.abs()).clamp(min=0)


class BoxSpike(torch.autograd.Function):
    """The commonest hand-written surrogate: a step forward, a box backward."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        return grads[0] * (u.abs() < 1).to(u.dtype)


spike = BoxSpike.apply


class LIF(nn.Module):
    """A neuron that keeps its membrane on itself; a spike sets it to 0, outside autograd."""

    def __init__(self, decay: float = 0.5, vth: float = 0.3) -> None:
        super().__init__()
        self.decay, self.vth = decay, vth
        self.v: Tensor | None = None

    def reset(self) -> None:
        self.v = None

    def forward(self, x: Tensor) -> Tensor:
        v = x if self.v is None else self.decay * self.v + x
        z: Tensor = Spike.apply(v - self.vth)  # type: ignore[no-untyped-call]
        self.v = v * (1 - z.detach())
        return z


class SoftLIF(nn.Module):
    """The same with a soft reset, through which the gradient goes; it says that it is a neuron."""

    is_neuron = True

    def __init__(self, decay: float = 0.5, threshold: float = 0.6) -> None:
        super().__init__()
        self.decay, self.threshold = decay, threshold
        self.mem: Tensor | None = None

    def reset(self) -> None:
        self.mem = None

    def forward(self, x: Tensor) -> Tensor:
        mem = x if self.mem is None else self.decay * self.mem + x
        spikes: Tensor = spike(mem - self.threshold)
        self.mem = mem - spikes * self.threshold
        return spikes
