"""BatchNorm in training over values that lie with their channels last, where no neuron takes it into its own kernels.

torch's kernels give each channel a lane and leave up to half of them idle where there are few channels, as in the first
layers of a network, whose images are the largest. Here a row holds several samples or places side by side, as many as
fill the lanes: [rows, C] in memory is [rows / k, k C] too. Forward: statistics (`batch_stats`), then one kernel.
Backward: one kernel for the two sums over the batch and one for the gradient. All in float32, or float64 for float64.

    y = (x - mean) r w + b,  r = (var + eps)^(-1/2)
    dx = w r (dy - sum(dy) / n - (x - mean) r^2 sum(dy (x - mean)) / n)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnpart import ops, shared_statistics
from snnpart.runtime.kernels.available import runs_kernels
from snnpart.runtime.kernels.batch_stats import batch_stats
from snnpart.runtime.kernels.layout import channels_last, whole
from snnpart.runtime.kernels.sums import over_programs
from snnpart.runtime.kernels.tiles import Tiles, folded_tiles, inner_of

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

LEAST = 2**20
"""Numbers below which torch's kernels, fewer, are as fast."""
_SUMMED, _EACH = 1024, 4096
"""Numbers in a tile of kernels that sum, and of the others."""

if triton is not None:  # its parser looks annotations up: only tl's may stand in a kernel

    @triton.jit  # type: ignore[untyped-decorator]
    def _batch_norm_forward(  # type: ignore[no-untyped-def]
        x, y, mean, var, weight, bias, rows, lanes, channels, EPS: tl.constexpr, AFFINE: tl.constexpr,
        R: tl.constexpr, B: tl.constexpr, CT: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * R + tl.arange(0, R)
        lane = tl.program_id(1) * B + tl.arange(0, B)
        own = lane < lanes
        channel = lane % channels
        middle = tl.load(mean + channel, mask=own, other=0.0)
        scale = 1.0 / tl.sqrt(tl.load(var + channel, mask=own, other=1.0) + tl.full([B], EPS, CT))
        shift = tl.zeros([B], CT)
        if AFFINE:
            scale = scale * tl.load(weight + channel, mask=own, other=0.0).to(CT)
            shift = tl.load(bias + channel, mask=own, other=0.0).to(CT)
        at = row[:, None] * lanes + lane[None, :]
        mask = (row < rows)[:, None] & own[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(CT)
        value = (value - middle[None, :]) * scale[None, :] + shift[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)

    @triton.jit  # type: ignore[untyped-decorator]
    def _batch_norm_sums(  # type: ignore[no-untyped-def]
        x, dy, mean, parts, rows, lanes, channels, tiles,
        R: tl.constexpr, B: tl.constexpr, CT: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        lane = tl.program_id(1) * B + tl.arange(0, B)
        own = lane < lanes
        middle = tl.load(mean + lane % channels, mask=own, other=0.0)
        plain = tl.zeros([R, B], CT)
        times = tl.zeros([R, B], CT)
        for tile in range(tiles):
            row = ((tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * tiles + tile) * R + tl.arange(0, R)
            at = row[:, None] * lanes + lane[None, :]
            mask = (row < rows)[:, None] & own[None, :]
            given = tl.load(dy + at, mask=mask, other=0.0).to(CT)
            plain += given
            times += given * (tl.load(x + at, mask=mask, other=0.0).to(CT) - middle[None, :])
        to = tl.program_id(0) * lanes + lane
        tl.store(parts + to, tl.sum(plain, axis=0), mask=own)
        tl.store(parts + tl.num_programs(0) * lanes + to, tl.sum(times, axis=0), mask=own)

    @triton.jit  # type: ignore[untyped-decorator]
    def _batch_norm_backward(  # type: ignore[no-untyped-def]
        x, dy, dx, mean, var, weight, sums, rows, lanes, channels, count, EPS: tl.constexpr, AFFINE: tl.constexpr,
        R: tl.constexpr, B: tl.constexpr, CT: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * R + tl.arange(0, R)
        lane = tl.program_id(1) * B + tl.arange(0, B)
        own = lane < lanes
        channel = lane % channels
        middle = tl.load(mean + channel, mask=own, other=0.0)
        scale = 1.0 / tl.sqrt(tl.load(var + channel, mask=own, other=1.0) + tl.full([B], EPS, CT))
        plain = tl.load(sums + channel, mask=own, other=0.0) / count
        times = tl.load(sums + channels + channel, mask=own, other=0.0) / count * scale * scale
        if AFFINE:
            scale = scale * tl.load(weight + channel, mask=own, other=0.0).to(CT)
        at = row[:, None] * lanes + lane[None, :]
        mask = (row < rows)[:, None] & own[None, :]
        given = tl.load(dy + at, mask=mask, other=0.0).to(CT)
        away = tl.load(x + at, mask=mask, other=0.0).to(CT) - middle[None, :]
        found = (given - plain[None, :] - away * times[None, :]) * scale[None, :]
        tl.store(dx + at, found.to(dx.dtype.element_ty), mask=mask)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    copies: int = 1,
) -> Tensor:
    """`ops.batch_norm`, or with more than one copy `ops.batch_norm_copies`, by kernels where they are faster."""
    kept = all(value is None or value.is_contiguous() for value in (running_mean, running_var))
    if not (training and kept and takes(x, momentum) and (weight is None) == (bias is None)):
        rest = (running_mean, running_var, num_batches_tracked, training, momentum, eps)
        plain = ops.batch_norm if copies == 1 else ops.batch_norm_copies
        return plain(x, weight, bias, *rest, *(() if copies == 1 else (copies,)))  # type: ignore[no-any-return, operator]
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    found: Tensor = _Apply.apply(x, whole(weight), whole(bias), running_mean, running_var, momentum, eps, copies)
    return found


def takes(x: Tensor, momentum: float | None) -> bool:
    """Whether x lies with its channels last on a GPU, is large, and is normalised by this rank's own statistics."""
    usual = momentum is not None and not shared_statistics.shared() and x.is_floating_point()
    return runs_kernels(x) and usual and x.dim() > 1 and x.numel() >= max(LEAST, 2 * x.shape[1]) and inner_of(x) == 1


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float,
        copies: int,
    ) -> Tensor:  # fmt: skip
        tiles, fold = folded_tiles(x.numel(), x.shape[1], _SUMMED, sums=True)
        mean, var = batch_stats(x, tiles, running_mean, running_var, momentum, copies=copies, fold=fold)
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        y = torch.empty_like(x)
        each, _ = folded_tiles(x.numel(), x.shape[1], _EACH, sums=False)
        affine = weight is not None
        _batch_norm_forward[each.grid](
            x, y, mean, var, *((weight, bias) if affine else (x, x)), each.rows, each.channels, x.shape[1],
            EPS=eps, AFFINE=affine, **_constants(each, x),
        )  # fmt: skip
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, mean, var, weight = ctx.saved_tensors
        channels, affine = x.shape[1], weight is not None
        dy = channels_last(dy)
        tiles, fold = folded_tiles(x.numel(), channels, _SUMMED, sums=True)
        parts = mean.new_empty(2, tiles.programs, tiles.channels)
        _batch_norm_sums[tiles.grid](
            x, dy, mean, parts, tiles.rows, tiles.channels, channels, tiles.tiles, **_constants(tiles, x)
        )
        sums = over_programs(parts.view(2, tiles.programs * fold, channels))
        dx = torch.empty_like(x)
        each, _ = folded_tiles(x.numel(), channels, _EACH, sums=False)
        _batch_norm_backward[each.grid](
            x, dy, dx, mean, var, weight if affine else x, sums, each.rows, each.channels, channels,
            x.numel() // channels, EPS=ctx.eps, AFFINE=affine, **_constants(each, x),
        )  # fmt: skip
        dw = db = None
        if affine:
            dw, db = (sums[1] * torch.rsqrt(var[0] + ctx.eps)).to(weight.dtype), sums[0].to(weight.dtype)
        return (dx, dw, db, *(None,) * 5)


def _constants(tiles: Tiles, x: Tensor) -> dict[str, Any]:
    compute = torch.float64 if x.dtype is torch.float64 else torch.float32
    own = tiles.constants(compute)
    return {**{name: own[name] for name in ("R", "B", "CT", "WIDE")}, "num_warps": 4}
