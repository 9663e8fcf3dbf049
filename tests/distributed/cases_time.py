"""Networks of the cases about time: BatchNorm in a window, event frames, windows of many lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.distributed.cases import LIF, det, fill

DTYPES = (torch.uint8, torch.int16, torch.bool)


class Normed(nn.Module):
    """Case A08: one step of a layer with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.bn = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.c(x))
        return out


def normed() -> nn.Module:
    return fill(Normed(), scale=0.9)


class Casts(nn.Module):
    """Case A27: the cast is the network's first operation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.to(torch.float64))
        return out


def counts(kind: torch.dtype, *shape: int, k: float = 0.7) -> Tensor:
    """Event counts of an integer dtype or bool; only int16 holds negative ones."""
    made = (det(*shape, k=k) * 3).round()
    return (made if kind is torch.int16 else made.abs()).to(kind)


def stateless() -> nn.Module:
    """Case A27's network without the cast."""
    return fill(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 2)), scale=0.9)


class Events(nn.Module):
    """[N, T, 2, 4, 4] frames as CIFAR10-DVS and DVS Gesture loaders collate them -> [N, 3], the mean over time."""

    def __init__(self, cast: bool = True) -> None:
        super().__init__()
        self.cast = cast
        self.conv, self.one = nn.Conv2d(2, 6, 3, padding=1), LIF(vth=0.2)
        self.fc, self.two = nn.Linear(96, 8), LIF(vth=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.to(self.conv.weight.dtype) if self.cast else x
        out = [
            self.head(self.two(self.fc(self.one(self.conv(frames[:, t])).flatten(1)))) for t in range(frames.shape[1])
        ]
        return torch.stack(out).mean(0)


def events(cast: bool = True) -> nn.Module:
    return fill(Events(cast), scale=0.9)


class Frame(nn.Module):
    """One step of an event network: the loop over [N, T, 2, 4, 4] is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lif, self.head = nn.Conv2d(2, 6, 3, padding=1), LIF(vth=0.2), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lif(self.conv(x.double())).flatten(1))
        return out


def frame() -> nn.Module:
    return fill(Frame(), scale=0.9)


def windows(lengths: Sequence[int], samples: int, kind: torch.dtype = torch.uint8) -> list[tuple[Tensor, Tensor]]:
    """Batches of event frames with these numbers of steps, and targets."""
    return [
        (counts(kind, samples, steps, 2, 4, 4, k=0.3 + 0.07 * i), torch.arange(samples) % 3)
        for i, steps in enumerate(lengths)
    ]
