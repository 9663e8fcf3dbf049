"""B07, B09: MS-ResNet and the networks of temporal efficient training, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.plain import Tent, spike

time_window, thresh, decay = 3, 0.5, 0.25
device = torch.device("cpu")


class Membrane(nn.Module):
    """Steps over module-wide `time_window`, writing each step's spikes into a tensor of zeros."""

    is_neuron = True

    def forward(self, x: Tensor) -> Tensor:
        fired = torch.zeros_like(x[0]).to(device)
        output = torch.zeros_like(x)
        mem: Any = 0
        for i in range(time_window):
            mem = x[i] if i == 0 else mem * decay * (1 - fired.detach()) + x[i]
            fired = spike(mem - thresh)
            output[i] = fired
        return output


class StepConv(nn.Conv2d):
    """A convolution over [T, N, C, H, W] that fills its result step by step."""

    def forward(self, x: Tensor) -> Tensor:
        h = (x.size(3) + 2 * self.padding[0] - self.kernel_size[0]) // self.stride[0] + 1  # type: ignore[operator]
        w = (x.size(4) + 2 * self.padding[1] - self.kernel_size[1]) // self.stride[1] + 1  # type: ignore[operator]
        c1 = torch.zeros(time_window, x.size(1), self.out_channels, h, w, dtype=x.dtype, device=x.device)
        for i in range(time_window):
            c1[i] = F.conv2d(x[i], self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return c1


class TimeNorm(nn.BatchNorm3d):
    """Statistics over all steps: channels stand at dim 1 only after a transposition."""

    def __init__(self, channels: int, start: float = thresh) -> None:
        super().__init__(channels)
        nn.init.constant_(self.weight, start)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 2).contiguous().transpose(0, 1).contiguous()
        y = super().forward(y)
        return y.transpose(0, 1).contiguous().transpose(0, 2)


class MsBlock(nn.Module):
    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.residual_function = nn.Sequential(
            Membrane(),
            StepConv(wide, out, 3, stride=stride, padding=1, bias=False),
            TimeNorm(out),
            Membrane(),
            StepConv(out, out, 3, padding=1, bias=False),
            TimeNorm(out, 0.2 * thresh),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or wide != out:
            self.shortcut = nn.Sequential(StepConv(wide, out, 1, stride=stride, bias=False), TimeNorm(out))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual_function(x) + self.shortcut(x)
        return out


class MsResNet(nn.Module):
    """[N, 3, H, W] -> [N, 5]; the image is written T times into a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(StepConv(3, 6, 3, padding=1, bias=False), TimeNorm(6))
        self.conv2_x, self.conv3_x = nn.Sequential(MsBlock(6, 6, 1), MsBlock(6, 6, 1)), MsBlock(6, 11, 2)
        self.mem_update, self.fc = Membrane(), nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.zeros(time_window, *x.shape, dtype=x.dtype, device=device)
        for i in range(time_window):
            frames[i] = x
        y = self.mem_update(self.conv3_x(self.conv2_x(self.conv1(frames))))
        y = F.adaptive_avg_pool3d(y, (None, 1, 1)).flatten(2)
        out: Tensor = self.fc(y.mean(dim=0))
        return out


class LifSpike(nn.Module):
    """[N, T, ...]: the membrane starts as the number 0, the surrogate is kept on the instance."""

    is_neuron = True

    def __init__(self, thresh: float = 1.0, tau: float = 0.5, gama: float = 1.0) -> None:
        super().__init__()
        self.act, self.thresh, self.tau, self.gama = Tent.apply, thresh, tau, gama

    def forward(self, x: Tensor) -> Tensor:
        mem: Any = 0
        pot = []
        T = x.shape[1]
        for t in range(T):
            mem = mem * self.tau + x[:, t, ...]
            fired = self.act(mem - self.thresh, self.gama)  # type: ignore[no-untyped-call]
            mem = (1 - fired) * mem
            pot.append(fired)
        return torch.stack(pot, dim=1)


class SeqToBatch(nn.Module):
    """Runs layers on [N * T, ...]."""

    def __init__(self, *args: nn.Module) -> None:
        super().__init__()
        self.module: nn.Module = args[0] if len(args) == 1 else nn.Sequential(*args)

    def forward(self, x: Tensor) -> Tensor:
        shape = [x.shape[0], x.shape[1]]
        y = self.module(x.flatten(0, 1).contiguous())
        shape.extend(y.size()[1:])
        return y.view(shape)


class ConvLayer(nn.Module):
    def __init__(self, wide: int, out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.fwd = SeqToBatch(nn.Conv2d(wide, out, kernel, stride, kernel // 2), nn.BatchNorm2d(out))
        self.act = LifSpike()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.fwd(x))
        return out


class VggSnn(nn.Module):
    """[N, T, 2, 16, 16] -> [N, T, 5]: one pooling object stands four times in the features."""

    def __init__(self) -> None:
        super().__init__()
        pool = SeqToBatch(nn.AvgPool2d(2))
        self.features = nn.Sequential(
            ConvLayer(2, 5), ConvLayer(5, 7), pool, ConvLayer(7, 9), pool, ConvLayer(9, 9), pool, ConvLayer(9, 10), pool
        )
        self.classifier = nn.Sequential(nn.Dropout(0.0), SeqToBatch(nn.Linear(10, 5)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.features(x), 2)
        out: Tensor = self.classifier(x)
        return out


class TdBlock(nn.Module):
    """Norms that stand under two names: as an attribute and inside a container."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.conv1_s, self.conv2_s = SeqToBatch(self.conv1, self.bn1), SeqToBatch(self.conv2, self.bn2)
        self.spike1, self.spike2 = LifSpike(), LifSpike()
        self.downsample: nn.Module | None = None
        if stride != 1 or wide != out:
            self.downsample = SeqToBatch(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.conv2_s(self.spike1(self.conv1_s(x)))
        out += identity
        return self.spike2(out)  # type: ignore[no-any-return]


class TetResNet(nn.Module):
    """[N, 3, H, W] -> [N, T, 5]; T is an attribute that callers set."""

    def __init__(self) -> None:
        super().__init__()
        self.T = 1
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6)
        self.conv1_s, self.spike = SeqToBatch(self.conv1, self.bn1), LifSpike()
        self.layer1, self.layer2 = TdBlock(6, 6, 1), TdBlock(6, 11, 2)
        self.avgpool, self.fc1 = SeqToBatch(nn.AdaptiveAvgPool2d((1, 1))), SeqToBatch(nn.Linear(11, 8))
        self.spike2, self.fc2 = LifSpike(), SeqToBatch(nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).repeat(1, self.T, 1, 1, 1)
        x = self.layer2(self.layer1(self.spike(self.conv1_s(x))))
        x = torch.flatten(self.avgpool(x), 2)
        out: Tensor = self.fc2(self.spike2(self.fc1(x)))
        return out


def tet_resnet() -> nn.Module:
    net = TetResNet()
    net.T = 3
    return net
