"""Copies between layouts, of pairs of orders of four dims. Run as a program it makes them in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from snnpart.runtime.kernels.layout import copy_laid

SIZES = ((2, 3, 5, 7), (3, 24, 1, 64), (1, 70, 66, 2), (2, 8, 16, 24))
ORDERS = tuple(itertools.permutations(range(4)))


def laid(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, device: str, gap: int) -> Tensor:
    """Zeros of the shape whose dims lie in this order, the innermost of them part of a dim that is `gap` longer."""
    sizes = [shape[dim] for dim in order]
    whole = torch.zeros(*sizes[:-1], sizes[-1] + gap, dtype=dtype, device=device)
    part = whole.narrow(3, gap, sizes[-1])
    return part.permute([order.index(dim) for dim in range(4)])


def copied(shape: tuple[int, ...], dtype: torch.dtype, device: str, gap: int = 0) -> Iterator[tuple[str, bool]]:
    """Whether every bit arrives, and nothing else is touched, also where what is copied is no number."""
    for there, here in itertools.product(ORDERS[:8], ORDERS):
        source, to = laid(shape, there, dtype, device, 0), laid(shape, here, dtype, device, gap)
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (source.numel() * dtype.itemsize,), device=device)
        source.permute(there).reshape(-1).view(torch.uint8).copy_(bits)
        copy_laid(to, source)
        arrived = torch.equal(_bits(to), _bits(source))
        to.zero_()
        assert to._base is not None
        yield f"{shape} {there} to {here}", arrived and not to._base.reshape(-1).view(torch.uint8).any().item()


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    for shape in SIZES[:2]:
        for name, right in copied(shape, torch.float32, "cpu"):
            print(json.dumps({"case": name, "right": right}))
    sys.exit(0)
