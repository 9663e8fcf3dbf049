"""Mean and variance of every channel over a batch, or over each step of it, and the update of BatchNorm's running ones.

Two kernels: each program of the first goes down some rows of some channels with Welford's update in every lane (one
pass, no cancellation), and leaves count, mean and squared deviations; the second puts these together by Chan's formula
and updates the running statistics, step after step. Nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

from snnpart.runtime.kernels.tiles import Tiles, columns_for

if triton is not None:  # its parser looks annotations up: only tl's may stand in a kernel

    def _partial_stats(  # type: ignore[no-untyped-def]
        x, parts, rows, channels, inner, tiles, INNER: tl.constexpr, R: tl.constexpr, B: tl.constexpr, CT: tl.constexpr,
        WIDE: tl.constexpr,
    ):  # fmt: skip
        ch = tl.program_id(1) * B + tl.arange(0, B)
        step = tl.program_id(2).to(tl.int64) if WIDE else tl.program_id(2)
        x += step * rows * channels
        parts += step * 3 * tl.num_programs(0) * channels
        seen = tl.zeros([1, 1], CT)
        count = tl.zeros([R, 1], CT)
        mean = tl.zeros([R, B], CT)
        squares = tl.zeros([R, B], CT)
        for tile in range(tiles):
            row = ((tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * tiles + tile) * R + tl.arange(0, R)
            there = (row < rows)[:, None]
            place = row * channels if INNER == 1 else (row // inner) * (channels * inner) + row % inner
            at = place[:, None] + (ch if INNER == 1 else ch * inner)[None, :]
            value = tl.load(x + at, mask=there & (ch < channels)[None, :], other=0.0).to(CT)
            seen += 1.0
            count += there.to(CT)
            change = tl.where(there, value - mean, 0.0)
            mean += change * (1.0 / seen)  # a row that is there was there in every tile before
            squares += change * (value - mean)
        whole = tl.sum(count, axis=0) + tl.zeros([B], CT)
        middle = tl.sum(count * mean, axis=0) / tl.maximum(whole, 1.0)
        away = mean - middle[None, :]
        total = tl.sum(squares + count * away * away, axis=0)
        programs = tl.num_programs(0)
        at_part = tl.program_id(0) * channels + ch
        tl.store(parts + at_part, whole, mask=ch < channels)
        tl.store(parts + programs * channels + at_part, middle, mask=ch < channels)
        tl.store(parts + 2 * programs * channels + at_part, total, mask=ch < channels)

    def _final_stats(  # type: ignore[no-untyped-def]
        parts, mean, var, running_mean, running_var, programs, channels, copies, steps, MOMENTUM: tl.constexpr,
        TRACK: tl.constexpr, P: tl.constexpr, B: tl.constexpr, CT: tl.constexpr,
    ):  # fmt: skip
        ch = tl.program_id(0) * B + tl.arange(0, B)
        own = ch < channels
        program = tl.arange(0, P)
        mask = (program < programs)[:, None] & own[None, :]
        at = program[:, None] * channels + ch[None, :]
        momentum = tl.full([B], MOMENTUM, CT)
        kept = tl.zeros([B], CT)
        kept_var = tl.zeros([B], CT)
        if TRACK:
            kept = tl.load(running_mean + ch, mask=own).to(CT)
            kept_var = tl.load(running_var + ch, mask=own).to(CT)
        for step in range(steps):
            first = parts + step * 3 * programs * channels
            count = tl.load(first + at, mask=mask, other=0.0)
            middle = tl.load(first + programs * channels + at, mask=mask, other=0.0)
            squares = tl.load(first + 2 * programs * channels + at, mask=mask, other=0.0)
            n = tl.sum(count, axis=0)
            m = tl.sum(count * middle, axis=0) / tl.maximum(n, 1.0)
            away = middle - m[None, :]
            total = tl.sum(squares + count * away * away, axis=0)
            tl.store(mean + step * channels + ch, m, mask=own)
            tl.store(var + step * channels + ch, total / tl.maximum(n, 1.0), mask=own)
            kept += momentum * (m - kept)
            kept_var += momentum * (total * copies / tl.maximum(n * copies - 1.0, 1.0) - kept_var)
        if TRACK:
            tl.store(running_mean + ch, kept.to(running_mean.dtype.element_ty), mask=own)
            tl.store(running_var + ch, kept_var.to(running_var.dtype.element_ty), mask=own)

    partial_stats, final_stats = triton.jit(_partial_stats), triton.jit(_final_stats)


def batch_stats(
    x: Tensor,
    tiles: Tiles,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    *,
    copies: int = 1,
    steps: int = 1,
    fold: int = 1,
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [steps, C] of x over everything but channels, of each of `steps` parts of it in a row.

    Running statistics are updated in place, once a step, as by `copies` equal x in one batch, whose unbiased variance
    is another. x lies as `tiles` says in memory, which is for one step; `fold`: rows of channels in one of its rows.
    """
    compute = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts = x.new_empty((steps, 3, tiles.programs, tiles.channels), dtype=compute)
    channels, programs = tiles.channels // fold, tiles.programs * fold
    mean, var = x.new_empty((2, steps, channels), dtype=compute)
    partial_stats[(*tiles.grid, steps)](
        x, parts, tiles.rows, tiles.channels, tiles.inner, tiles.tiles, **tiles.constants(compute), num_warps=4
    )  # fmt: skip
    columns = columns_for(programs)
    final_stats[(triton.cdiv(channels, columns),)](
        parts, mean, var, mean if running_mean is None else running_mean, var if running_var is None else running_var,
        programs, channels, copies, steps, momentum, running_mean is not None,
        triton.next_power_of_2(programs), columns, tiles.compute(compute), num_warps=4,
    )  # fmt: skip
    return mean, var
