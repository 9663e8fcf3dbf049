"""B12: a U-Net whose neurons keep their state in persistent buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.plain import spike


class Rate(torch.autograd.Function):
    """Forward the recorded rate, backward a clipped line through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return rate.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * ((x > 0) & (x < 2)).to(grads[0].dtype), None


class BufferNeuron(nn.Module):
    """An integrate-and-fire neuron. Its buffers take the shape of what comes; a mask sets `v` to 0 where it
    fired (`hard`) or subtracts the threshold there, in place.

    `state` says what a call does: "snn" one step, "train" the rates recorded so far with a gradient of their own.
    """

    is_neuron = True

    def __init__(self, hard: bool, threshold: float = 1.0) -> None:
        super().__init__()
        self.hard, self.threshold, self.state = hard, threshold, "snn"
        for name in ("v", "acc_input", "spikecount"):
            self.register_buffer(name, torch.zeros(1))
        self.v: Tensor
        self.acc_input: Tensor
        self.spikecount: Tensor
        self.steps = 0

    def reset(self) -> None:
        self.v, self.acc_input, self.spikecount = (torch.zeros(1, dtype=self.v.dtype) for _ in range(3))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.state == "train":
            recorded: Tensor = Rate.apply(x, self.spikecount / max(self.steps, 1))  # type: ignore[no-untyped-call]
            return recorded
        if self.steps == 0:
            self.v, self.acc_input, self.spikecount = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
        self.steps += 1
        v = self.v + x
        out = spike(v - self.threshold)
        if self.hard:
            v[out.bool()] = 0.0
        else:
            v[out.bool()] -= self.threshold
        self.v, self.acc_input = v, self.acc_input + x.detach()
        self.spikecount = self.spikecount + out.detach()
        return out


class Level(nn.Module):
    def __init__(self, wide: int, out: int, hard: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), BufferNeuron(hard)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class SpikingUNet(nn.Module):
    """[N, 3, 16, 16] -> [N, 2, 16, 16]: five levels down, four up; strided convolutions beside the pooled path."""

    def __init__(self, hard: bool = True, widths: tuple[int, ...] = (4, 5, 6, 7, 8), steps: int = 2) -> None:
        super().__init__()
        self.steps = steps
        before = (3, *(2 * width for width in widths[:-1]))
        self.encoders = nn.ModuleList(Level(a, b, hard) for a, b in zip(before, widths))
        self.downs = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.decoders = nn.ModuleList(Level(2 * width, width, hard) for width in widths[:-1])
        self.last = nn.Conv2d(widths[0], 2, 1)

    def step(self, x: Tensor) -> Tensor:
        skips = []
        for encoder, down in zip(self.encoders, self.downs):
            x = encoder(x)
            skips.append(x)
            x = torch.cat([F.max_pool2d(x, 2), down(x)], 1)
        x = self.encoders[-1](x)
        for i in range(len(self.ups) - 1, -1, -1):
            x = self.decoders[i](torch.cat([skips[i], self.ups[i](x)], 1))
        out: Tensor = self.last(x)
        return out

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, BufferNeuron):
                module.reset()

    def forward(self, x: Tensor) -> Tensor:
        self.reset()
        total: Any = 0
        for _ in range(self.steps):
            total = total + self.step(x)
        out: Tensor = total / self.steps
        return out


class RecordedUNet(SpikingUNet):
    """The second mode: the spiking steps record rates without a gradient, then one pass learns from them."""

    def forward(self, x: Tensor) -> Tensor:
        neurons: list[Any] = [module for module in self.modules() if isinstance(module, BufferNeuron)]
        with torch.no_grad():
            super().forward(x)
        for module in neurons:
            module.state = "train"
        out = self.step(x)
        for module in neurons:
            module.state = "snn"
        return out
