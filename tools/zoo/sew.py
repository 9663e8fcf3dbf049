"""B01, B02: spike-element-wise residual networks, for still images and for event frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn


def lif() -> nn.Module:
    return neuron.IFNode(surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")


def conv(wide: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution and BatchNorm over [T, N, ...]."""
    return layer.SeqToANNContainer(
        nn.Conv2d(wide, out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(out)
    )


class Shortcut(nn.Module):
    """What both blocks do at their end: the spikes of branch and shortcut meet as a string says."""

    def __init__(self, wide: int, out: int, stride: int, connect: str) -> None:
        super().__init__()
        self.connect = connect
        self.downsample: nn.Module | None = None
        if stride != 1 or wide != out:
            self.downsample = nn.Sequential(conv(wide, out, 1, stride), lif())

    def join(self, out: Tensor, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        if self.connect == "ADD":
            out += identity
        elif self.connect == "AND":
            out *= identity
        elif self.connect == "IAND":
            out = identity * (1.0 - out)
        else:
            raise NotImplementedError(self.connect)
        return out


class Basic(Shortcut):
    def __init__(self, wide: int, out: int, stride: int, connect: str) -> None:
        super().__init__(wide, out, stride, connect)
        self.conv1, self.sn1 = conv(wide, out, 3, stride), lif()
        self.conv2, self.sn2 = conv(out, out, 3), lif()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.sn2(self.conv2(self.sn1(self.conv1(x)))), x)


class Bottleneck(Shortcut):
    def __init__(self, wide: int, out: int, stride: int, connect: str, groups: int = 2) -> None:
        super().__init__(wide, out, stride, connect)
        inner = out // 2
        self.conv1, self.sn1 = conv(wide, inner, 1), lif()
        self.conv2, self.sn2 = conv(inner, inner, 3, stride, groups), lif()
        self.conv3, self.sn3 = conv(inner, out, 1), lif()

    def forward(self, x: Tensor) -> Tensor:
        out = self.sn2(self.conv2(self.sn1(self.conv1(x))))
        return self.join(self.sn3(self.conv3(out)), x)


class SewResNet(nn.Module):
    """[N, 3, H, W] -> [N, 5]: the stem runs once, then the image is repeated T times under a new leading dim."""

    def __init__(self, connect: str, steps: int = 3) -> None:
        super().__init__()
        self.T = steps
        self.conv1, self.bn1, self.sn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), lif()
        self.maxpool = layer.SeqToANNContainer(nn.MaxPool2d(2))
        self.layer1 = nn.Sequential(Basic(6, 6, 1, connect), Basic(6, 6, 1, connect))
        self.layer2 = nn.Sequential(Bottleneck(6, 12, 2, connect), Basic(12, 12, 1, connect))
        self.avgpool = layer.SeqToANNContainer(nn.AdaptiveAvgPool2d((1, 1)))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x.unsqueeze_(0)
        x = x.repeat(self.T, 1, 1, 1, 1)
        x = self.layer2(self.layer1(self.maxpool(self.sn1(x))))
        x = torch.flatten(self.avgpool(x), 2)
        out: Tensor = self.fc(x.mean(dim=0))
        return out


def sew_resnet(connect: str) -> Callable[[], nn.Module]:
    return lambda: SewResNet(connect)


def plif() -> nn.Module:
    return neuron.ParametricLIFNode(init_tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")


class SewBlock(nn.Module):
    def __init__(self, wide: int, mid: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(conv(wide, mid, 3), plif(), conv(mid, wide, 3), plif())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class EventNet(nn.Module):
    """[N, T, 2, H, W] -> [N, classes]: built from a list of dicts; time comes to the front inside."""

    def __init__(self, plan: list[dict[str, Any]], size: int, classes: int = 11) -> None:
        super().__init__()
        wide = 2
        stages: list[nn.Module] = []
        for entry in plan:
            if entry["up"]:
                stages.append(nn.Sequential(conv(wide, entry["channels"], entry["up"]), plif()))
                wide = entry["channels"]
            stages.extend(SewBlock(wide, entry["mid"]) for _ in range(entry["blocks"]))
            if entry["pool"] > 1:
                stages.append(layer.SeqToANNContainer(nn.MaxPool2d(entry["pool"])))
        with torch.no_grad():  # the classifier's width is what pooling leaves of a dummy image
            x = torch.zeros(1, 1, wide, size, size)
            for stage in stages:
                if isinstance(stage, layer.SeqToANNContainer):
                    x = stage(x)
        self.conv = nn.Sequential(*stages)
        self.out = nn.Sequential(nn.Flatten(2), nn.Linear(x.numel(), classes))

    def forward(self, x: Tensor) -> Tensor:
        functional.reset_net(self)
        x = x.permute(1, 0, 2, 3, 4)
        return self.out(self.conv(x)).mean(0)


def event_net() -> nn.Module:
    plan = [
        {"channels": 5, "up": 1, "mid": 5, "blocks": 1, "pool": 4},
        {"channels": 6, "up": 3, "mid": 4, "blocks": 2, "pool": 4},
    ]
    return EventNet(plan, size=16)
