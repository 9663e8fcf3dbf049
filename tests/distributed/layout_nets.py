"""Networks over images of which ranks see other sizes, or have other nodes: [N, 3, 6, 6] -> [N, 4]."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Masked(nn.Module):
    """Three channels are masked by one of images: on a rank with a single channel both have the same shape."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)) * torch.sigmoid(x.mean(1, keepdim=True))
        return self.head(torch.tanh(self.second(y)).mean((2, 3)))  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """Three groups, of which a fourth rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.third, self.head = nn.Conv2d(6, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Convolutions over sequences before and behind the products of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.merged = nn.Conv2d(3, 8, 3, padding=1), nn.Conv1d(8, 24, 1)
        self.point, self.head = nn.Conv1d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)).flatten(2)
        q, k, v = torch.tanh(self.merged(y)).unflatten(1, (3, 4, 2)).unbind(1)
        y = (v @ k.mT @ q).flatten(1, 2)
        return self.head(torch.tanh(self.point(y)).mean(2))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """What a convolution by groups reads on each rank, another one reads gathered; over sequences, and then images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(3, 8, 1), nn.Linear(8, 4)
        self.point, self.apart = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.full, self.depth = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cumsum(torch.tanh(self.first(x.flatten(2))), 2)
        y = (self.apart(y) + self.point(y)).unflatten(2, (6, 6))
        y = torch.cumsum(torch.tanh(y), 2)
        return self.head(torch.tanh(self.full(y) + self.depth(y)).mean((2, 3)))  # type: ignore[no-any-return]


NETS: dict[str, type[nn.Module]] = {"masked": Masked, "grouped": Grouped, "heads": Heads, "branches": Branches}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]().double()


def images() -> Tensor:
    return torch.linspace(0, 1, 4 * 3 * 36, dtype=torch.float64).sin().view(4, 3, 6, 6)


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 2, 4, dtype=out.dtype)).sum(-1).square().mean()
