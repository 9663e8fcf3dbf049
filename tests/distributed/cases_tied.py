"""Networks whose ends share parameters: cut so that several stages hold a copy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.case import Case, fill, reset
from tests.neurons import LIF
from tests.neurons import data as det


class LanguageModel(nn.Module):
    """One matrix at both ends of four spiking blocks, the second end with a bias: tokens [N, 5] -> [N, 5, 7]."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.up = nn.ModuleList(nn.Linear(4, 6) for _ in range(blocks))
        self.fire = nn.ModuleList(LIF(vth=0.3) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(6, 4) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        reset(self)
        x = self.emb(tokens)
        for up, fire, down in zip(self.up, self.fire, self.down, strict=True):
            spikes = torch.stack([fire(step) for step in up(x).unbind(1)], 1)
            x = x + down(spikes)
        return self.logits(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Transposed(LanguageModel):
    """The logits come from the transposed matrix, without a module of their own."""

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.emb.weight.t() + self.head.bias


class Shared(nn.Module):
    """One convolution first and last, each time in front of neurons of its own: [N, 3, 6, 6] -> [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.between = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.fire = nn.ModuleList(LIF(vth=0.2) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        out = torch.zeros_like(x[:, :, 0, 0])
        for _ in range(2):
            y = self.fire[0](self.conv(x) * self.scale)
            for conv, fire in zip(self.between, self.fire[1:4], strict=True):
                y = fire(conv(y))
            out = out + self.fire[4](self.conv(y) * self.scale).mean((2, 3))
        return out


class Everywhere(nn.Module):
    """One layer in front of each of six neuron layers, a norm of its own behind each: [N, 6] -> [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(6))
        self.fire = nn.ModuleList(LIF(vth=0.3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        out = torch.zeros_like(x)
        for _ in range(2):
            y = x
            for norm, fire in zip(self.norms, self.fire, strict=True):
                y = y + fire(norm(self.layer(y)))
            out = out + y
        head: Tensor = self.head(out)
        return head


def _cells(*size: int) -> nn.Module:
    """Two cells with one learned number (or one for each channel), which the network registers; needs norse."""
    from tests.frameworks.test_shared_numbers import Net

    return Net("model", size)


def _currents() -> list[tuple[Tensor, Tensor]]:
    return [(det(6, 4, 4, k=0.3 + 0.2 * i) * 3, det(4, 3, k=0.7)) for i in range(2)]


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    return (torch.arange(25) * 3 + step).reshape(5, 5) % 7, (torch.arange(25) + 1).reshape(5, 5) % 7


def _over_tokens(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


TIED = {
    "tied ends": Case(
        lambda: fill(LanguageModel(), scale=0.9), lambda: [_tokens(i) for i in range(2)], loss=_over_tokens
    ),
    "everywhere": Case(
        lambda: fill(Everywhere(), scale=0.9),
        lambda: [(det(5, 6, k=0.3 + 0.2 * i) * 2, torch.arange(5) % 3) for i in range(2)],
        loss=F.cross_entropy,
    ),
    "shared number": Case(_cells, _currents, batch_dim=1, options={"in_dims": 1}),
    "shared numbers": Case(lambda: _cells(6), _currents, batch_dim=1, options={"in_dims": 1}),
    "shared conv": Case(
        lambda: fill(Shared(), scale=0.9),
        lambda: [(det(5, 3, 6, 6, k=0.3 + 0.2 * i) * 2, torch.arange(5) % 3) for i in range(2)],
        loss=F.cross_entropy,
    ),
}
