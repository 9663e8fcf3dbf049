"""B17: Norse's networks for images and for speech commands, state passed by hand."""

from __future__ import annotations

from typing import Any

import norse.torch as norse
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fast(kind: Any, **given: Any) -> Any:
    """Parameters with which membranes move within a few steps."""
    return kind(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0), **given)


class ConvNet(nn.Module):
    """[N, 3, 12, 12] -> log-probabilities [N, 4]: a SequentialState whose state list has holes; max over time."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        p = fast(norse.LIFParameters)
        self.features = norse.SequentialState(
            nn.Conv2d(3, 5, 3, bias=False),
            norse.LIFCell(p),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 6, 3, bias=False),
            norse.LIFCell(p),
            nn.Flatten(),
        )
        self.classification = norse.SequentialState(
            nn.Linear(54, 7, bias=False), norse.LIFCell(p), norse.LILinearCell(7, 4, fast(norse.LIParameters))
        )

    def forward(self, x: Tensor) -> Tensor:
        state_features, state_classes, voltages = None, None, []
        for _ in range(self.steps):
            out, state_features = self.features(x, state_features)
            out, state_classes = self.classification(out, state_classes)
            voltages.append(out + 0.001 * torch.randn(out.shape[0], 4, dtype=out.dtype, device=out.device))
        best, _ = torch.max(torch.stack(voltages), 0)
        return F.log_softmax(best, dim=1, _stacklevel=5)


class Nested(nn.Module):
    """A SequentialState within another, so that states nest: [N, 6] -> ([N, 3], nested state)."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        p = fast(norse.LIFParameters)
        self.steps = steps
        inner = norse.SequentialState(nn.Linear(8, 7), norse.LIFCell(p), nn.Linear(7, 5))
        self.net = norse.SequentialState(nn.Linear(6, 8), norse.LIFCell(p), inner, norse.LIFCell(p), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        state: Any = None
        total: Any = 0.0
        for _ in range(self.steps):
            y, state = self.net(x, state)
            total = total + y
        return total, state


class Speech(nn.Module):
    """[T, N, 7] -> log-probabilities [N, 3]: an adaptive recurrent cell, a leaky readout, noise at every step."""

    def __init__(self, noise: float = 0.001) -> None:
        super().__init__()
        self.noise = noise
        self.lsnn = norse.LSNNRecurrentCell(7, 5, p=fast(norse.LSNNParameters))
        self.readout = norse.LILinearCell(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        s1, s2, voltages = None, None, []
        for step in x:
            z, s1 = self.lsnn(step, s1)
            v, s2 = self.readout(z, s2)
            voltages.append(v + self.noise * torch.randn_like(v) if self.noise else v)
        best, _ = torch.max(torch.stack(voltages), 0)
        return F.log_softmax(best, dim=1, _stacklevel=5)


def speech() -> nn.Module:
    net = Speech()
    with torch.no_grad():
        net.lsnn.input_weights.mul_(6)
    return net
