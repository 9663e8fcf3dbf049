"""Statistics and sums over channels of many programs beside torch's. Run as a program, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from snnpart.runtime.kernels import tiles
from snnpart.runtime.kernels.batch_stats import batch_stats
from snnpart.runtime.kernels.sums import over_programs

SHAPES = ((7, 5, 9, 8), (3, 70, 5, 5), (1, 3, 40, 1))


def images(shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """Far from zero, where a sum of squares would lose digits."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1000
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def statistics(x: Tensor) -> dict[str, float]:
    """How far mean, variance and the running ones are from torch's, with several programs of several tiles."""
    channels = x.shape[1]
    inner = tiles.inner_of(x)
    assert inner is not None
    own = tiles.tiles_for(x.numel() // channels, channels, inner, 64, x.numel(), sums=True)
    kept = torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)
    mean, var = batch_stats(x, own, *kept, 0.1)
    norm = nn.BatchNorm2d(channels).double()
    norm(x)
    wanted = (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False), norm.running_mean, norm.running_var)
    off = [float((a - b).abs().max()) for a, b in zip((mean[0], var[0], *kept), wanted, strict=True)]  # type: ignore[operator]
    return {"off": max(off), "programs": own.programs, "tiles": own.tiles}


def found() -> Iterator[dict[str, float]]:
    """All shapes in both layouts, and sums over programs."""
    for shape in SHAPES:
        yield from (statistics(images(shape, last)) for last in (False, True))
    parts = torch.randn(3, 37, 21, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    yield {"off": float((over_programs(parts) - parts.sum(1)).abs().max()), "programs": 37, "tiles": 1}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    tiles._PROGRAMS = 4
    for line in found():
        sys.stdout.write(json.dumps(line) + "\n")
