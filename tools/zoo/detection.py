"""B10, B11: dense and depthwise backbones with several maps, and a detector read from a list of layers."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from tools.zoo.plain import spike


def plif() -> nn.Module:
    from spikingjelly.activation_based import neuron, surrogate

    return neuron.ParametricLIFNode(init_tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")


def merged(*layers: nn.Module) -> nn.Module:
    from spikingjelly.activation_based import layer

    container: nn.Module = layer.SeqToANNContainer(*layers)
    return container


class DenseLayer(nn.Module):
    """Norm, padding and neuron before the convolution; its result stands behind its inputs."""

    def __init__(self, wide: int, growth: int) -> None:
        super().__init__()
        self.bn, self.pad, self.act = merged(nn.BatchNorm2d(wide)), merged(nn.ConstantPad2d(1, 0.0)), plif()
        self.conv = merged(nn.Conv2d(wide, growth, 3, bias=False))

    def forward(self, features: list[Tensor]) -> Tensor:
        out: Tensor = self.conv(self.act(self.pad(self.bn(torch.cat(features, 2)))))
        return out


class DenseBlock(nn.ModuleDict):
    def __init__(self, count: int, wide: int, growth: int) -> None:
        super().__init__()
        for i in range(count):
            self[f"layer{i}"] = DenseLayer(wide + i * growth, growth)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 2)


class Depthwise(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            merged(nn.BatchNorm2d(wide), nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)),
            plif(),
            merged(nn.BatchNorm2d(wide), nn.Conv2d(wide, out, 1, bias=False)),
            plif(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Backbone(nn.Module):
    """[T, N, 2, H, W] -> a list of maps [N, C, h, w], summed over T; hooks count what fires."""

    def __init__(self, stages: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.features = nn.Sequential(OrderedDict(stages))
        self.numels: dict[str, int] = {}
        self.nz: dict[str, Any] = {}
        for name, module in self.named_modules():
            if type(module).__name__ == "ParametricLIFNode":
                module.register_forward_hook(self.counting(name))

    def counting(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.numels[name] = self.numels.get(name, 0) + output.numel()
            self.nz[name] = self.nz.get(name, 0) + torch.count_nonzero(output.detach())

        return hook

    def forward(self, x: Tensor) -> list[Tensor]:
        for name, _ in self.named_modules():
            self.nz.pop(name, None)
            self.numels.pop(name, None)
        out = []
        for name, stage in self.features.named_children():
            x = stage(x)
            if name.startswith("scale"):
                out.append(x.sum(dim=0))
        return out


def dense_backbone() -> nn.Module:
    """Widths 5, 5 + i * 3, halved in the transition, on and on."""
    transition = nn.Sequential(plif(), merged(nn.BatchNorm2d(11), nn.Conv2d(11, 5, 1, bias=False), nn.AvgPool2d(2)))
    last = nn.Sequential(plif(), merged(nn.Conv2d(14, 9, 3, stride=2, padding=1, bias=False)), plif())
    return Backbone(
        [
            ("stem", merged(nn.Conv2d(2, 5, 3, padding=1, bias=False))),
            ("dense1", DenseBlock(2, 5, 3)),
            ("transition1", transition),
            ("scale_dense2", DenseBlock(3, 5, 3)),
            ("scale_last", last),
        ]
    )


def depthwise_backbone() -> nn.Module:
    return Backbone(
        [
            ("stem", nn.Sequential(merged(nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False)), plif())),
            ("scale_one", Depthwise(6, 9)),
            ("pool", merged(nn.MaxPool2d(2))),
            ("scale_two", Depthwise(9, 12)),
        ]
    )


time_window = 2


class MemUpdate(nn.Module):
    """[T, N, ...] over the module's `time_window`."""

    is_neuron = True

    def forward(self, x: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        mem: Any = 0
        for i in range(time_window):
            mem = 0.25 * mem + x[i]
            fired = spike(mem - 0.5)
            mem = mem * (1 - fired.detach())
            output[i] = fired
        return output


class Conv(nn.Module):
    """Convolution and norm over [T, N, ...], then spikes."""

    def __init__(self, wide: int, out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(wide, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)
        self.act = MemUpdate()
        self.f, self.i = -1, 0  # set by the parser: where the input comes from, and this layer's number

    def forward(self, x: Tensor) -> Tensor:
        T, N = x.shape[:2]
        y = self.bn(self.conv(x.flatten(0, 1)))
        out: Tensor = self.act(y.reshape(T, N, *y.shape[1:]))
        return out


class Residual(Conv):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x: Tensor) -> Tensor:
        T, N = x.shape[:2]
        y = self.up(x.flatten(0, 1))
        return y.reshape(T, N, *y.shape[1:])


class Concat(nn.Module):
    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.cat(x, 2)


class Detect(nn.Module):
    """Boxes at every scale. It writes into the list it is given; in eval it decodes in place and gives two results."""

    def __init__(self, classes: int, anchors: tuple[tuple[float, ...], ...], widths: list[int]) -> None:
        super().__init__()
        self.outputs, self.scales, self.count = classes + 5, len(anchors), len(anchors[0]) // 2
        self.stride = torch.ones(self.scales)
        self.grid: list[Tensor] = [torch.zeros(1)] * self.scales
        self.anchors: Tensor
        self.register_buffer("anchors", torch.tensor(anchors).view(self.scales, -1, 2))
        self.m = nn.ModuleList(nn.Conv2d(width, self.outputs * self.count, 1) for width in widths)

    def forward(self, x: list[Tensor]) -> Any:
        decoded = []
        for i in range(self.scales):
            x[i] = self.m[i](x[i].mean(0))
            n, _, ny, nx = x[i].shape
            x[i] = x[i].view(n, self.count, self.outputs, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
            if not self.training:
                if self.grid[i].shape[2:4] != x[i].shape[2:4]:
                    self.grid[i] = self.make_grid(nx, ny, x[i])
                y = x[i].sigmoid()
                y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + self.grid[i]) * self.stride[i]
                y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * self.anchors[i].view(1, -1, 1, 1, 2)
                decoded.append(y.view(n, -1, self.outputs))
        return x if self.training else (torch.cat(decoded, 1), x)

    @staticmethod
    def make_grid(nx: int, ny: int, like: Tensor) -> Tensor:
        rows, columns = torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")
        return torch.stack((columns, rows), 2).view(1, 1, ny, nx, 2).to(like.dtype)


LAYERS: list[tuple[Any, str, tuple[Any, ...]]] = [
    (-1, "Conv", (3, 5, 3, 2)),
    (-1, "Conv", (5, 7, 3, 2)),
    (-1, "Residual", (7, 7)),
    (-1, "Conv", (7, 9, 3, 2)),
    (-1, "Up", ()),
    ((-1, 2), "Concat", ()),
    (-1, "Conv", (16, 8)),
    ((6, 3), "Detect", (2, ((4.0, 6.0, 8.0, 5.0), (12.0, 10.0, 9.0, 14.0)), [8, 9])),
]


class Detector(nn.Module):
    """[N, 3, H, W] -> in training a list of maps, in eval (decoded boxes, list of maps)."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {kind.__name__: kind for kind in (Conv, Residual, Up, Concat, Detect)}
        layers: list[nn.Module] = []
        self.save: list[int] = []
        for i, (source, kind, arguments) in enumerate(deepcopy(LAYERS)):
            module: Any = kinds[kind](*arguments)
            module.i, module.f = i, source
            self.save.extend(j for j in ([source] if isinstance(source, int) else source) if j != -1)
            layers.append(module)
        self.model = nn.Sequential(*layers)
        detect: Any = self.model[-1]
        with torch.no_grad():
            detect.stride = torch.tensor([32 / x.shape[-2] for x in self.forward(torch.zeros(1, 3, 32, 32))])

    def forward(self, x: Tensor) -> Any:
        out: Any = x.unsqueeze(0).repeat(time_window, 1, 1, 1, 1)
        y: list[Any] = []
        for module in self.model:
            source: Any = module.f
            if source != -1:
                out = y[source] if isinstance(source, int) else [out if j == -1 else y[j] for j in source]
            out = module(out)
            y.append(out if module.i in self.save else None)
        return out
