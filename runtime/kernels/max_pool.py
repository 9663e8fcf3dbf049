"""Runs `ops_pool.max_pool2d` on the GPU: one kernel forward, one backward, without atomics.

Forward leaves the maximum of each window and, in a byte, where in the window it was. Backward goes over the input: the
places of a stride by stride tile lie at the same positions inside the windows that cover them, so that which windows to
ask stands in the text; each place adds up the gradients of those that chose it, in the order of the windows.

Both take images [P, H, W, L] that are contiguous: [N, H, W, C] with channels last, else [N * C, H, W, 1].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from snnpart import ops_pool
from snnpart.ops_pool import Pair, Window
from snnpart.runtime.kernels.available import runs_kernels
from snnpart.runtime.kernels.tiles import Tiles, inner_of

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_SIZE = 1024
"""Numbers that a program has in registers."""
_WIDEST = 64

if triton is not None:  # its parser looks annotations up: only tl's may stand in a kernel

    @triton.jit  # type: ignore[untyped-decorator]
    def _max_pool_forward(  # type: ignore[no-untyped-def]
        x, y, codes, rows, lanes, height, width, high, wide, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
        SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, R: tl.constexpr, B: tl.constexpr, CT: tl.constexpr,
        KEEP: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * R + tl.arange(0, R)
        lane = tl.program_id(1) * B + tl.arange(0, B)
        mask = (row < rows)[:, None] & (lane < lanes)[None, :]
        top = (row // wide) % high * SH - PH
        left = row % wide * SW - PW
        image = row // wide // high * height
        best = tl.full([R, B], float("-inf"), CT)
        first = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)
        code = first.to(tl.int32)[:, None] + tl.zeros([R, B], tl.int32)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                inside = (top + i >= 0) & (top + i < height) & (left + j >= 0) & (left + j < width)
                at = tl.multiple_of(((image + top + i) * width + left + j) * lanes, SIDE)
                own = mask & inside[:, None]
                value = tl.load(x + at[:, None] + lane[None, :], mask=own, other=float("-inf")).to(CT)
                better = (value > best) | (value != value)
                best = tl.where(better, value, best)
                code = tl.where(better, i * KW + j, code)
        out = tl.multiple_of(row * lanes, SIDE)[:, None] + lane[None, :]
        tl.store(y + out, best.to(y.dtype.element_ty), mask=mask)
        if KEEP:
            tl.store(codes + out, code.to(tl.uint8), mask=mask)

    @triton.jit  # type: ignore[untyped-decorator]
    def _max_pool_backward(  # type: ignore[no-untyped-def]
        dy, codes, dx, rows, lanes, height, width, high, wide, across, down, KH: tl.constexpr, KW: tl.constexpr,
        SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
        CT: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * R + tl.arange(0, R)
        lane = tl.program_id(1) * B + tl.arange(0, B)
        mask = (row < rows)[:, None] & (lane < lanes)[None, :]
        q, r, image = (row // across) % down, row % across, row // across // down
        BACK_H: tl.constexpr = (KH - 1) // SH
        BACK_W: tl.constexpr = (KW - 1) // SW
        for i in tl.static_range(SH):
            for j in tl.static_range(SW):
                total = tl.zeros([R, B], CT)
                for a in tl.static_range(BACK_H + 1):
                    for b in tl.static_range(BACK_W + 1):
                        if (i + (BACK_H - a) * SH < KH) and (j + (BACK_W - b) * SW < KW):
                            oh, ow = q - (BACK_H - a), r - (BACK_W - b)
                            there = (oh >= 0) & (oh < high) & (ow >= 0) & (ow < wide)
                            at = tl.multiple_of(((image * high + oh) * wide + ow) * lanes, SIDE)
                            at = at[:, None] + lane[None, :]
                            own = mask & there[:, None]
                            code = tl.load(codes + at, mask=own, other=255).to(tl.int32)
                            here = (i + (BACK_H - a) * SH) * KW + j + (BACK_W - b) * SW
                            total += tl.load(dy + at, mask=own & (code == here), other=0.0).to(CT)
                ih, iw = q * SH + i - PH, r * SW + j - PW
                inside = (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
                at = tl.multiple_of(((image * height + ih) * width + iw) * lanes, SIDE)[:, None] + lane[None, :]
                tl.store(dx + at, total.to(dx.dtype.element_ty), mask=mask & inside[:, None])


def max_pool2d(
    x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair = (1, 1), ceil_mode: bool = False
) -> Tensor:
    """`ops_pool.max_pool2d`, by kernels where x is on a GPU; the result lies in memory as x does."""
    if not runs_kernels(x) or not x.numel():
        return ops_pool.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    found: Tensor = _Apply.apply(x, Window(kernel_size, stride, padding, ceil_mode))
    return found


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        ctx.window, ctx.shape, ctx.last = window, x.shape, x.stride(1) == 1 or inner_of(x) == 1
        images = _images(x, ctx.last)
        high, wide = window.outputs(*images.shape[1:3])
        y = images.new_empty(images.shape[0], high, wide, images.shape[3])
        keeps = ctx.needs_input_grad[0]
        codes = torch.empty_like(y, dtype=torch.uint8) if keeps else None
        rows, sizes = y.numel() // y.shape[3], (y.shape[3], *images.shape[1:3], high, wide)
        grid, constants = _launch(window, images, rows)
        _max_pool_forward[grid](images, y, y if codes is None else codes, rows, *sizes, **constants, KEEP=keeps)
        ctx.save_for_backward(codes)
        return _as_before(y, x.shape, ctx.last)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        window, (_, _, height, width) = ctx.window, ctx.shape
        dx = dy.new_empty(codes.shape[0], height, width, codes.shape[3])
        down, across = (
            (n - 1 + p) // s + 1 for n, p, s in zip((height, width), window.padding, window.stride, strict=True)
        )
        rows, sizes = codes.shape[0] * down * across, (codes.shape[3], height, width, *codes.shape[1:3], across, down)
        grid, constants = _launch(window, dx, rows)
        _max_pool_backward[grid](_images(dy, ctx.last), codes, dx, rows, *sizes, **constants)
        return _as_before(dx, ctx.shape, ctx.last), None


def _images(x: Tensor, last: bool) -> Tensor:
    """x [N, C, H, W] as the kernels take it."""
    return x.movedim(1, -1).contiguous() if last else x.contiguous().flatten(0, 1).unsqueeze(-1)


def _as_before(images: Tensor, shape: torch.Size, last: bool) -> Tensor:
    """What the kernels made, as [N, C, ...]."""
    return images.movedim(-1, 1) if last else images.view(*shape[:2], *images.shape[1:3])


def _launch(window: Window, images: Tensor, rows: int) -> tuple[Pair, dict[str, Any]]:
    """The grid, and the constants of both kernels, for `rows` rows of lanes."""
    lanes = images.shape[3]
    width = min(_WIDEST, triton.next_power_of_2(lanes))
    height = max(1, min(_SIZE // width, triton.next_power_of_2(rows)))
    names = ("KH", "KW", "SH", "SW", "PH", "PW")
    constants = dict(zip(names, (*window.size, *window.stride, *window.padding), strict=True))
    more = {"R": height, "B": width, "CT": Tiles.compute(images.dtype), "WIDE": images.numel() >= 2**31}
    more["SIDE"] = math.gcd(lanes, 16)  # numbers that are read together, which Triton sees only of multiples of 16
    return (triton.cdiv(rows, height), triton.cdiv(lanes, width)), {**constants, **more}
