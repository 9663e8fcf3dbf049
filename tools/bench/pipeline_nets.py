"""The networks of the pipeline benchmark: published ones at their sizes, and a chain of layers that wait.

The waiting chain takes the same time on any machine, so that what a schedule costs can be seen on two cores: each layer
sleeps in its forward, and in each half of its backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAIT = 0.004
"""Seconds of each half of a waiting layer's forward; a half of its backward takes twice that."""


@dataclass(frozen=True)
class Net:
    """A network and a batch for it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    layout: str = "TNCHW"
    classes: int = 1000

    def batch(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(self.shape, generator=generator)
        y = torch.arange(self.shape[self.layout.index("N")]) % self.classes
        return x.to(device), y.to(device)

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the answers [N, classes], or of their mean over T where they are [T, N, classes]."""
        return F.cross_entropy(answers.mean(0) if answers.dim() == 3 else answers, targets)


def sew_resnet(depth: int) -> nn.Module:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import sew_resnet as zoo

    model: nn.Module = getattr(zoo, f"sew_resnet{depth}")(cnf="ADD", spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(model, "m")
    return model


def spiking_vgg16() -> nn.Module:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import spiking_vgg

    model: nn.Module = spiking_vgg.spiking_vgg16_bn(spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(model, "m")
    return model


def spikformer_s() -> nn.Module:
    from spikingjelly.activation_based.model import spikformer

    model: nn.Module = spikformer.spikformer_s()
    return model


class Level(nn.Module):
    """Two convolutions with BatchNorm and a LIF neuron each, over [T, N, C, H, W]."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        from spikingjelly.activation_based import layer, neuron

        widths = (inside, out), (out, out)
        self.parts = nn.Sequential(
            *(
                part
                for a, b in widths
                for part in (
                    layer.Conv2d(a, b, 3, padding=1, bias=False, step_mode="m"),
                    layer.BatchNorm2d(b, step_mode="m"),
                    neuron.LIFNode(step_mode="m"),
                )
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts(x)
        return out


class UNet(nn.Module):
    """Four levels down and up with concatenated skips, and a pooled head: every skip crosses the stages between."""

    def __init__(self, width: int = 24, levels: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(Level(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(Level(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        steps, skips = x.shape[0], []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x.flatten(0, 1), 2).unflatten(0, (steps, -1)) if level is not self.down[-1] else x
        for level, skip in zip(self.up, skips[-2::-1], strict=True):
            large = F.interpolate(x.flatten(0, 1), scale_factor=2.0).unflatten(0, (steps, -1))
            x = level(torch.cat([large, skip], 2))
        out: Tensor = self.head(x.mean((0, 3, 4)))
        return out


class Wait(torch.autograd.Function):
    """Sleeps in forward, twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WAIT)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * WAIT)
        return grad.clone()


class Waiting(nn.Module):
    """A linear layer whose input and whose weight wait: a gradient of each half of the backward takes as long. The
    first one scales its input, so that this has a gradient too, and all layers take the same time."""

    def __init__(self, width: int, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.scale = nn.Parameter(torch.ones(width)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else x * self.scale
        return F.linear(Wait.apply(x), Wait.apply(self.weight))  # type: ignore[no-untyped-call]


def waiting_chain() -> nn.Module:
    return nn.Sequential(*[Waiting(8, first=i == 0) for i in range(8)])


NETS = {
    "sew_resnet34": Net(lambda: sew_resnet(34), (4, 2, 3, 64, 64)),
    "sew_resnet152": Net(lambda: sew_resnet(152), (4, 2, 3, 64, 64)),
    "spikformer_s": Net(spikformer_s, (4, 2, 3, 32, 32), classes=100),
    "spiking_vgg16": Net(spiking_vgg16, (4, 2, 3, 64, 64)),
    "unet": Net(UNet, (4, 2, 3, 32, 32), classes=10),
}
CHAIN = Net(waiting_chain, (16, 8), "NF", classes=8)
SMALL = Net(lambda: sew_resnet(34), (4, 8, 3, 32, 32))
LARGE = Net(lambda: sew_resnet(34), (4, 32, 3, 128, 128))
