"""Max poolings by codes beside torch's: images with ties, with places that are no number and with infinite ones.

Run as a program in Triton's interpreter it compares the kernels with torch's on the CPU and prints what differs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snnpart.runtime.kernels.max_pool import max_pool2d

Pair = tuple[int, int]
Pool = Callable[..., Tensor]


@dataclass(frozen=True)
class Pooling:
    """The arguments of `torch.max_pool2d` behind x."""

    size: Pair
    stride: Pair
    padding: Pair = (0, 0)
    ceil: bool = False

    def of(self, pool: Pool, x: Tensor) -> Tensor:
        return pool(x, self.size, self.stride, self.padding, (1, 1), self.ceil)


POOLINGS = (
    Pooling((3, 3), (2, 2), (1, 1)),
    Pooling((2, 2), (2, 2)),
    Pooling((3, 3), (2, 2), ceil=True),
    Pooling((3, 2), (1, 3), (1, 0), ceil=True),
    Pooling((2, 3), (3, 1), (0, 1), ceil=True),
    Pooling((5, 5), (1, 1), (2, 2)),
    Pooling((1, 1), (2, 2)),
)
SHAPES = ((2, 5, 9, 7), (1, 3, 6, 8), (2, 1, 5, 5), (1, 70, 5, 5))


def images(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Small whole numbers, so that most windows have several maxima; the first image has places that are no number."""
    x = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, 0, 0] = x[0, 0, 1, 1] = float("nan")
    x[-1, -1, :, -1] = float("-inf")
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def ran(pool: Pool, pooling: Pooling, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of x for gradients that differ from window to window."""
    own = x.clone().requires_grad_()
    y = pooling.of(pool, own)
    dy = torch.rand(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(dy.to(y))
    assert own.grad is not None
    return y.detach(), own.grad


def differs(pool: Pool, pooling: Pooling, x: Tensor) -> list[str]:
    """What is not bit for bit as torch's: values, gradient, or the order in memory."""
    (want, wanted), (found, made) = ran(torch.max_pool2d, pooling, x), ran(pool, pooling, x)
    same = torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(found.isnan(), want.isnan())
    layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    as_before = found.is_contiguous(memory_format=layout) and made.is_contiguous(memory_format=layout)
    checks = {"values": same, "gradient": torch.equal(made, wanted), "layout": as_before}
    return [name for name, holds in checks.items() if not holds]


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    count = 0
    for pooling, shape, last in itertools.product(POOLINGS, SHAPES, (False, True)):
        off = differs(max_pool2d, pooling, images(shape, torch.float64, last))
        count += 1
        if off:
            sys.stdout.write(f"{pooling} {shape} {last}: {off}\n")
    sys.stdout.write(f"{count} compared\n")
