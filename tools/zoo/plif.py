"""B08: the networks of parametric leaky neurons, with neurons of plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.plain import Slope


class Plif(nn.Module):
    """Learned time constant, learned slope of the surrogate, membrane changed in place from the number 0."""

    is_neuron = True

    def __init__(self, tau: float = 2.0, threshold: float = 1.0) -> None:
        super().__init__()
        self.w, self.slope = nn.Parameter(torch.tensor(1.0 / (tau - 1.0)).log()), nn.Parameter(torch.tensor(2.0))
        self.threshold = threshold
        self.v: Any = 0.0

    def reset(self) -> None:
        self.v = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.v, float):
            self.v = torch.zeros_like(x)
        self.v += (x - self.v) * self.w.sigmoid()
        out: Tensor = Slope.apply(self.v - self.threshold, self.slope)  # type: ignore[no-untyped-call]
        self.v = self.v * (1.0 - out)
        return out


class WindowDropout(nn.Module):
    """One mask for all steps until it is reset."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.mask: Tensor | None = None

    def reset(self) -> None:
        self.mask = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.mask is None:
            self.mask = F.dropout(torch.ones_like(x), self.p, training=True)
        return self.mask * x


class PlifNet(nn.Module):
    """[N, 1, 12, 12] -> [N, classes]: the first convolution once, the rest T times; neighbours vote in tens."""

    def __init__(self, steps: int = 3, classes: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.T, self.epoch, self.train_times, self.max_test_accuracy = steps, 0, 0, 0.0
        self.static_conv = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.conv = nn.Sequential(
            Plif(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            Plif(),
            nn.AvgPool2d(2),
        )
        self.fc = nn.Sequential(
            nn.Flatten(),
            WindowDropout(dropout),
            nn.Linear(63, 18, bias=False),
            Plif(),
            WindowDropout(dropout),
            nn.Linear(18, 10 * classes, bias=False),
            Plif(),
        )
        self.boost = nn.AvgPool1d(10, 10)

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, (Plif, WindowDropout)):
                module.reset()

    def forward(self, x: Tensor) -> Tensor:
        x = self.static_conv(x)
        out_spikes_counter = self.boost(self.fc(self.conv(x)).unsqueeze(1)).squeeze(1)
        for _ in range(1, self.T):
            out_spikes_counter += self.boost(self.fc(self.conv(x)).unsqueeze(1)).squeeze(1)
        return out_spikes_counter / self.T


def plif_net() -> nn.Module:
    return PlifNet()


def plif_net_dropout() -> nn.Module:
    return PlifNet(dropout=0.3)
