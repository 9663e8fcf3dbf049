"""Networks for tests of the vision entry points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.nets import Spike


class Digits(nn.Module):
    """Images [N, 1, 8, 8] to logits [N, 10] in three steps, with BatchNorm: learns the digits in a few epochs."""

    def __init__(self, width: int = 16, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.conv1, self.norm1 = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        v, w, total = 0.0, 0.0, 0.0
        for _ in range(self.steps):
            v = 0.5 * v + self.norm1(self.conv1(x))
            spikes = Spike.apply(v - 1.0)
            v = v * (1 - spikes.detach())
            w = 0.5 * w + self.norm2(self.conv2(spikes))
            spikes = Spike.apply(w - 1.0)
            w = w * (1 - spikes.detach())
            total = total + self.head(spikes.flatten(1))
        return total / self.steps  # type: ignore[return-value]


class Plain(nn.Module):
    """Images [N, 1, 4, 4] to logits [N, 3] in float64, without BatchNorm: the same on every topology to rounding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(6 * 16, 3)
        self.drop = nn.Dropout(dropout)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        v, total = 0.0, 0.0
        for _ in range(2):
            v = 0.5 * v + self.conv(x)
            spikes = Spike.apply(v - 0.3)
            v = v * (1 - spikes.detach())
            total = total + self.head(self.drop(spikes.flatten(1)))
        return total  # type: ignore[return-value]


class NoNumber(nn.Module):
    """A loss that is NaN from its fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += logits.requires_grad
        return nn.functional.cross_entropy(logits, targets) * (float("nan") if self.calls > 3 else 1.0)


class Frames(nn.Module):
    """Event frames [N, T, C, H, W] to logits [T, N, 4]."""

    def __init__(self, channels: int = 2, size: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(channels * size * size, 4)

    def forward(self, x: Tensor) -> Tensor:
        v: Any = 0.0
        found = []
        for t in range(x.shape[1]):
            v = 0.5 * v + self.head(x[:, t].flatten(1))
            spikes = Spike.apply(v - 0.2)
            v = v * (1 - spikes.detach())
            found.append(spikes + v)
        return torch.stack(found)
