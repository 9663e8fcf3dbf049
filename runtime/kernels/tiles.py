"""How a kernel goes over a tensor of channels: tiles of rows by channels, and how many of them one program takes.

A tensor [outer, C, ...] that is dense in memory is rows by channels: with channels last (or nothing behind them) a row
is a sample and place; in the contiguous layout a row is that too, but the channels of one lie `inner` apart, so that a
tile is one channel wide and long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_WIDEST = 64
_FOLDS = (1, 2, 4, 8, 16, 32)
_ADDED = 2**13
"""Partial sums that a program has in registers."""
_PROGRAMS = 512
"""That leave partial sums: enough to keep a GPU of 132 processors busy, few enough to add up quickly. Twice as many
where x is large."""
_LARGE = 2**24


@dataclass(frozen=True)
class Tiles:
    """`rows` by `channels` numbers; a tile has R by B of them, a program of `grid` takes `tiles` of them in turn."""

    rows: int
    channels: int
    inner: int
    R: int
    B: int
    tiles: int
    wide: bool

    @property
    def programs(self) -> int:
        """Programs along the rows."""
        return -(-self.rows // (self.R * self.tiles))

    @property
    def grid(self) -> tuple[int, int]:
        return self.programs, -(-self.channels // self.B)

    def constants(self, compute: torch.dtype) -> dict[str, Any]:
        """The kernels' compile-time arguments."""
        return {"INNER": min(self.inner, 2), "R": self.R, "B": self.B, "CT": self.compute(compute), "WIDE": self.wide}

    @staticmethod
    def compute(dtype: torch.dtype) -> Any:
        return tl.float64 if dtype is torch.float64 else tl.float32


def tiles_for(rows: int, channels: int, inner: int, size: int, total: int, *, sums: bool) -> Tiles:
    """Tiles of about `size` numbers; with `sums` a program takes several, so that few partial sums are left.

    `total` is the number of elements that are addressed.
    """
    width = 1 if inner > 1 else min(_WIDEST, triton.next_power_of_2(channels))
    height = max(1, min(size // width, triton.next_power_of_2(rows)))
    across = -(-channels // width)
    most = max(1, (2 * _PROGRAMS if total >= _LARGE else _PROGRAMS) // across)
    count = -(-rows // (height * most)) if sums else 1
    return Tiles(rows, channels, inner, height, width, count, total >= 2**31)


def folded_tiles(numel: int, channels: int, size: int, *, sums: bool) -> tuple[Tiles, int]:
    """Tiles over `numel` numbers that lie with their channels last, and how many rows of channels lie in one row of a
    tile: as many as leave the fewest lanes idle. With `sums` each of them leaves a partial sum of a program's: no more
    in all than one program adds up."""
    rows = numel // channels
    folds = [k for k in _FOLDS if rows % k == 0]
    found = {k: tiles_for(rows // k, k * channels, 1, size, numel, sums=sums) for k in folds}
    fitting = [k for k in folds if not sums or k * found[k].programs <= _ADDED]
    fold = min(fitting, key=lambda k: (_idle(k * channels), k))
    return found[fold], fold


def columns_for(programs: int) -> int:
    """Channels whose partial sums, one of each program, one program adds up."""
    return max(1, min(8, _ADDED // int(triton.next_power_of_2(programs))))


def _idle(lanes: int) -> float:
    """The share of lanes that a tile so wide has beyond those it needs, up to a full tile's."""
    width = min(_WIDEST, triton.next_power_of_2(lanes))
    return max(_WIDEST, -(-lanes // width) * width) / lanes


def inner_of(x: Tensor) -> int | None:
    """How far apart the channels (dim 1) of x [outer, C, ...] lie: 1 with channels last; None where x is not dense."""
    if x.dim() <= 2 or x.is_contiguous():
        return x[0, 0].numel() if x.is_contiguous() else None
    return 1 if x.movedim(1, -1).is_contiguous() else None
