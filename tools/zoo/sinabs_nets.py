"""B18: sinabs' event network and a network converted from an analog one, both with a batch size written in."""

from __future__ import annotations

import sinabs
import sinabs.layers as sl
import torch
from torch import Tensor, nn


class EventDigits(nn.Module):
    """[N, T, 2, 10, 10] -> [N, T, 10]: time flattened into the batch around the layers and taken out again."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.flatten, self.unflatten = sl.FlattenTime(), sl.UnflattenTime(batch_size)
        self.spiking_model = nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False),
            sl.IAFSqueeze(batch_size=batch_size, min_v_mem=-1.0),
            sl.SumPool2d(2),
            nn.Conv2d(6, 7, 3, bias=False),
            sl.IAFSqueeze(batch_size=batch_size, min_v_mem=-1.0),
            nn.Conv2d(7, 10, 2, bias=False),
            sl.IAFSqueeze(batch_size=batch_size, min_v_mem=-1.0),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.unflatten(self.spiking_model(self.flatten(x)))
        return out


class Converted(nn.Module):
    """[N, T, 28] -> [N, 10], the spikes summed over time."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        analog = nn.Sequential(nn.Linear(28, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU())
        self.model = sinabs.from_torch.from_model(analog, batch_size=batch_size)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        out: Tensor = self.model(x.reshape(-1, 28))
        return torch.sum(out.reshape(-1, steps, 10), 1)
