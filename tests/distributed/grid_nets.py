"""Networks for the grid of schedules: those of the zoo at any batch, one with two inputs, and a chain of neurons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.cases import CASES, det, fill
from tests.distributed.jobs import without_dropout
from tests.neurons import LIF
from tests.zoo import ZOO, Model


class Joined(nn.Module):
    """Two branches of an image and of a vector, joined by channels; the vector is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fire = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), LIF(vth=0.1)
        self.side, self.side_fire = nn.Linear(3, 5), LIF(vth=0.1)
        self.join, self.join_fire = nn.Linear(9, 6), LIF(vth=0.1)
        self.deep, self.deep_fire = nn.Linear(6, 6), LIF(vth=0.1)
        self.head = nn.Linear(9, 3)

    def forward(self, image: Tensor, vector: Tensor) -> dict[str, Tensor]:
        for part in self.modules():
            if isinstance(part, LIF):
                part.reset()
        a = self.fire(self.norm(self.conv(image))).mean((2, 3))
        b = self.side_fire(self.side(vector))
        joined = self.join_fire(self.join(torch.cat([a, b], -1)))
        deep = self.deep_fire(self.deep(joined))
        return {"out": self.head(torch.cat([deep + joined, vector], -1)), "deep": deep}


JOINED = Model(lambda: fill(Joined(), scale=0.9), ((2, 2, 5, 5), (2, 3)))
CHAIN = Model(CASES["leaves"].model, ((2, 4),))
NETS = {
    name: ZOO[name]
    for name in ("small_sew-m", "unet", "spikformer", "snntorch_leaky", "norse_sequential", "norse_lsnn", "recurrent")
    if name in ZOO
} | {"two_inputs": JOINED, "chain": CHAIN}
MOST = {
    "small_sew-m": 19, "unet": 13, "spikformer": 29, "snntorch_leaky": 6, "norse_sequential": 5, "norse_lsnn": 2,
    "recurrent": 3, "two_inputs": 6, "chain": 9,
}  # fmt: skip
"""Into how many stages each can be cut; a test looks whether it is so."""


def build(name: str) -> nn.Module:
    """The network in training mode, all its neuron layers firing, without random draws."""
    net = NETS[name]
    module = net.factory().double().train() if net in (JOINED, CHAIN) else net.build()[0]
    without_dropout(module)
    return module


def inputs(name: str, batch: int, seed: int) -> tuple[Tensor, ...]:
    """A batch of so many samples, the same for the same seed."""
    net, dim = NETS[name], NETS[name].in_dims
    if net is JOINED:
        return det(batch, 2, 5, 5, k=0.4 + 0.1 * seed) * 2, det(batch, 3, k=0.7 + 0.1 * seed) * 2
    if net is CHAIN:
        return (det(batch, 4, k=0.7 + 0.1 * seed) * 2,)
    shapes = tuple((*shape[:dim], batch, *shape[dim + 1 :]) for shape in net.shapes)
    return replace(net, shapes=shapes).inputs(seed)


def options(name: str) -> dict[str, Any]:
    """How `parallelize` is called."""
    return {"in_dims": NETS[name].in_dims, "verify": "off"}
