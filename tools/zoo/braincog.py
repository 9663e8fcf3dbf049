"""B19: networks with time and batch in one leading axis from encoder to head, or with the loop outside of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.plain import Slope


class Node(nn.Module):
    """A neuron that takes [(t b), ...] or one step; threshold and slope are parameters that are not learned."""

    is_neuron = True

    def __init__(self, step: int, layer_by_layer: bool, threshold: float = 0.5, tau: float = 2.0) -> None:
        super().__init__()
        self.step, self.layer_by_layer, self.tau = step, layer_by_layer, tau
        self.threshold = nn.Parameter(torch.tensor(threshold), requires_grad=False)
        self.alpha = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.mem: Any = 0.0
        self.spike: Any = 0.0

    def n_reset(self) -> None:
        self.mem = self.spike = 0.0

    def one(self, x: Tensor) -> Tensor:
        self.mem = self.mem + (x - self.mem) / self.tau
        self.spike = Slope.apply(self.mem - self.threshold, self.alpha)  # type: ignore[no-untyped-call]
        self.mem = self.mem * (1 - self.spike.detach())
        out: Tensor = self.spike
        return out

    def forward(self, x: Tensor) -> Tensor:
        if not self.layer_by_layer:
            return self.one(x)
        frames = x.unflatten(0, (self.step, -1))
        return torch.stack([self.one(frames[t]) for t in range(self.step)]).flatten(0, 1)


class ThresholdNorm(nn.BatchNorm2d):
    """Threshold-dependent BatchNorm: statistics over time too, scaled by the threshold."""

    def __init__(self, channels: int, step: int, layer_by_layer: bool, threshold: float = 0.5) -> None:
        super().__init__(channels)
        self.scale = threshold

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Base(nn.Module):
    """Encodes, resets all nodes inside forward, and averages over time."""

    def __init__(self, step: int, layer_by_layer: bool) -> None:
        super().__init__()
        self.step, self.layer_by_layer = step, layer_by_layer

    def encode(self, x: Tensor) -> Tensor:
        frames = x.unsqueeze(0).repeat(self.step, 1, 1, 1, 1)
        return frames.flatten(0, 1) if self.layer_by_layer else frames

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, Node):
                module.n_reset()

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        frames = self.encode(x)
        self.reset()
        if not self.layer_by_layer:
            return sum(self.body(frames[t]) for t in range(self.step)) / self.step  # type: ignore[return-value]
        return self.body(frames).unflatten(0, (self.step, -1)).mean(0)


class Block(nn.Module):
    def __init__(self, wide: int, out: int, stride: int, step: int, lbl: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), ThresholdNorm(out, step, lbl)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), ThresholdNorm(out, step, lbl)
        self.node1, self.node2 = Node(step, lbl), Node(step, lbl)
        self.short = nn.Sequential()
        if stride != 1 or wide != out:
            self.short = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), ThresholdNorm(out, step, lbl))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.node1(self.bn1(self.conv1(x)))))
        out += self.short(x)
        spikes: Tensor = self.node2(out)
        return spikes


class ResNet(Base):
    """[N, 3, H, W] -> [N, 5]."""

    def __init__(self, step: int = 3, layer_by_layer: bool = True) -> None:
        super().__init__(step, layer_by_layer)
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1, bias=False), ThresholdNorm(6, step, layer_by_layer))
        self.node = Node(step, layer_by_layer)
        self.layer1 = Block(6, 6, 1, step, layer_by_layer)
        self.layer2 = Block(6, 11, 2, step, layer_by_layer)
        self.fc = nn.Linear(11, 5)

    def body(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.node(self.stem(x))))
        out: Tensor = self.fc(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))
        return out


class Flattened(Base):
    """[N, 3, 8, 8] -> [N, 5]: after the first layer the steps become channels (`temporal_flatten`)."""

    def __init__(self, step: int = 2) -> None:
        super().__init__(step, layer_by_layer=True)
        self.conv1, self.bn1, self.node1 = nn.Conv2d(3, 4, 3, 1, 1), ThresholdNorm(4, step, True), Node(step, True)
        self.conv2, self.bn2, self.node2 = nn.Conv2d(4 * step, 7, 3, 2, 1), ThresholdNorm(7, 1, True), Node(1, True)
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.encode(x)
        self.reset()
        y = self.node1(self.bn1(self.conv1(frames)))
        y = y.unflatten(0, (self.step, -1)).permute(1, 2, 0, 3, 4).flatten(1, 2)
        y = self.node2(self.bn2(self.conv2(y)))
        out: Tensor = self.fc(y.mean((2, 3)))
        return out
