"""A residual network of snnTorch neurons, with its loop over time in `forward` as snnTorch's tutorials write it."""

from __future__ import annotations

from typing import Any

import snntorch as snn
import torch
from torch import Tensor, nn


class Spike(torch.autograd.Function):
    """Step forward, arctan surrogate backward; unlike snnTorch's own it keeps the dtype (theirs gives float32)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + (torch.pi * x) ** 2)


def spike(x: Tensor) -> Tensor:
    return Spike.apply(x)


def neuron() -> snn.Leaky:
    return snn.Leaky(beta=0.5, spike_grad=spike)


def convolution(channels_in: int, channels_out: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(channels_out)
    )


class Block(nn.Module):
    """Two convolutions with neurons, and the input added; one step of time."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.lif1 = convolution(channels_in, channels_out, stride), neuron()
        self.conv2, self.lif2 = convolution(channels_out, channels_out), neuron()
        same = stride == 1 and channels_in == channels_out
        self.skip = nn.Identity() if same else convolution(channels_in, channels_out, stride, 1)

    def forward(self, x: Tensor, mem1: Tensor, mem2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spikes, mem1 = self.lif1(self.conv1(x), mem1)
        spikes, mem2 = self.lif2(self.conv2(spikes) + self.skip(x), mem2)
        return spikes, mem1, mem2


class ResidualNet(nn.Module):
    """Images [N, 1, 8, 8] -> membranes of the ten output neurons at every step [T, N, 10]; 9 convolutions."""

    def __init__(self, steps: int = 4, width: int = 16) -> None:
        super().__init__()
        self.steps = steps
        self.stem, self.lif = convolution(1, width), neuron()
        self.block1 = Block(width, width, 1)
        self.block2 = Block(width, 2 * width, 2)
        self.block3 = Block(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width * 4, 10)
        self.out = neuron()

    def forward(self, x: Tensor) -> Tensor:
        blocks = (self.block1, self.block2, self.block3)
        mem, out = self.lif.init_leaky(), self.out.init_leaky()
        mems = [(block.lif1.init_leaky(), block.lif2.init_leaky()) for block in blocks]
        record = []
        for _ in range(self.steps):
            spikes, mem = self.lif(self.stem(x), mem)
            for index, block in enumerate(blocks):
                spikes, *mems[index] = block(spikes, *mems[index])
            _, out = self.out(self.fc(spikes.flatten(1)), out)
            record.append(out)
        return torch.stack(record)
