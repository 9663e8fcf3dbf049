"""Small networks for tests of the command line: hand-written neurons, no framework."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Spike(torch.autograd.Function):
    """Step forward, smooth backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + (3 * x) ** 2)


class Net(nn.Module):
    """Images [N, 3, 8, 8] -> [N, classes], two convolutions, three steps."""

    def __init__(self, classes: int = 4, neuron: type[torch.autograd.Function] = Spike) -> None:
        super().__init__()
        self.neuron = neuron
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, classes)

    def forward(self, x: Tensor) -> Tensor:
        v, total = 0.0, 0.0
        for _ in range(3):
            v = 0.5 * v + self.norm1(self.conv1(x))
            spikes = self.neuron.apply(v - 0.5)
            spikes = self.neuron.apply(self.norm2(self.conv2(spikes)) - 0.5) + spikes
            total = total + self.head(spikes.flatten(1))
        return total  # type: ignore[return-value]


class Branch(nn.Module):
    """Branches on the data."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Pointwise(nn.Module):
    """Works in any layout: every dim may be the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return Spike.apply(x - 0.5)


def make(classes: int = 4, flat: bool = False, scale: float = 1.0, name: str | None = None) -> nn.Module:
    """A factory with arguments of every kind."""
    net = Net(classes)
    net.settings = (flat, scale, name)  # type: ignore[assignment]
    return net


def number() -> int:
    return 3


MADE = Net()
