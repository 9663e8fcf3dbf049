"""What the ranks do in the tests of layers with shared channels."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from snnpart import layers
from snnpart.runtime.ranks import join
from tests.distributed.cases import det


def fill(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(det(*p.shape, k=0.37 + 0.01 * i) * 0.5)
    return module.double()


def block(kind: str) -> tuple[nn.Module, nn.Module, nn.Module, Tensor]:
    """Layer, norm, layer and an input: odd widths, other paddings, groups, [T, N, ...] or [N, ...]."""
    if kind == "linear":
        parts = (nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
        return (*map(fill, parts), det(6, 4))  # type: ignore[return-value]
    space = int(kind[4])
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[space - 1]
    groups = 2 if "grouped" in kind else 1
    first = conv(6, 8 if groups > 1 else 7, 3, padding=1, groups=groups, padding_mode="circular")
    width = first.out_channels
    parts = (first, norm(width), conv(width, 5, 3, stride=2, bias="plain" not in kind))  # type: ignore[assignment]
    x = det(2, 3, 6, *(6,) * space)
    for part in parts:
        part.step_mode = "m"  # type: ignore[assignment]
    return (*map(fill, parts), x)  # type: ignore[return-value]


def whole(kind: str) -> dict[str, Any]:
    """The block in one process."""
    first, norm, second, x = block(kind)
    x = x.clone().requires_grad_()
    merge = kind != "linear"
    y = second(torch.tanh(norm(first(x.flatten(0, 1) if merge else x))))
    (y * det(*y.shape, k=0.11)).sum().backward()
    tensors = {f"{i}.{n}": p for i, part in enumerate((first, norm, second)) for n, p in part.named_parameters()}
    found = {name: p.grad for name, p in tensors.items()}
    return {"y": y.detach(), "x": x.grad, **found, "mean": norm.running_mean, "var": norm.running_var}


def shared(kind: str) -> dict[str, Any]:
    """The block on tp ranks: what this rank holds of everything."""
    here = join(1, 2, device=torch.device("cpu"), timeout=timedelta(seconds=30))
    group = here.axes["tp"].group
    first, norm, second, x = block(kind)
    name = "Linear" if kind == "linear" else f"Conv{kind[4]}d"
    norms = "1d" if kind == "linear" else f"{kind[4]}d"
    a = getattr(layers, f"ChannelShard{name}")(first, group, mode="colwise")
    b = getattr(layers, f"ChannelShardBatchNorm{norms}")(norm, group)
    c = getattr(layers, f"ChannelShard{name}")(second, group, mode="rowwise")
    x = x.clone().requires_grad_()
    y = c(torch.tanh(b(a(x))))
    (y * det(*y.flatten(0, 1).shape if kind != "linear" else y.shape, k=0.11).view(y.shape)).sum().backward()
    found = {f"{i}.{n}": p.grad for i, part in enumerate((a, b, c)) for n, p in part.named_parameters()}
    result = {"y": y.detach(), "x": x.grad, **found, "mean": b.running_mean, "var": b.running_var}
    here.close()
    return result
