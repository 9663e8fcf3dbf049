"""`pack` and `unpack` of `snnpart.bits`: the torch reference on CPU, one Triton kernel each on CUDA.

Same arguments, same layout, bit-equal results (tests/gpu/test_bits.py). A program of the kernels handles BLOCK bytes of
every bit plane, that is 8 * BLOCK elements, and loads each element once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnpart import bits
from snnpart.bits import States, width
from snnpart.runtime.kernels.available import runs_kernels

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

BLOCK = 256


def pack(x: Tensor, states: States) -> Tensor:
    """The bit planes of x, bytes [b, ceil(n / 8)]."""
    if not runs_kernels(x) or x.dtype is torch.float64:
        return bits.pack(x, states)
    flat = x.contiguous().view(torch.uint8 if x.dtype is torch.bool else x.dtype).reshape(-1)
    size = -(-flat.numel() // 8)
    planes = torch.empty(width(states[1]), size, dtype=torch.uint8, device=x.device)
    if size:
        low = 0 if x.dtype is torch.bool else states[0]
        _pack[(triton.cdiv(size, BLOCK),)](flat, planes, flat.numel(), size, low, planes.shape[0], BLOCK)
    return planes


def unpack(planes: Tensor, elements: int, states: States, dtype: torch.dtype) -> Tensor:
    """The first `elements` numbers of bit planes, in one dim."""
    out = torch.empty(elements, dtype=dtype, device=planes.device)
    unpack_into(planes, out.view(1, elements, 1), states)
    return out


def unpack_into(planes: Tensor, out: Tensor, states: States) -> None:
    """Put the first numbers of bit planes into `out` [outer, size, inner], whose rows [size, inner] are contiguous. The
    planes may go on behind them: pieces that are smaller than others travel at the size of the largest."""
    elements = out.numel()
    if not runs_kernels(planes) or out.dtype is torch.float64:
        out.copy_(bits.unpack(planes, elements, states, out.dtype).view(out.shape))
        return
    size, low = planes.shape[1], 0 if out.dtype is torch.bool else states[0]
    if elements:
        wire = out.view(torch.uint8) if out.dtype is torch.bool else out
        run, apart = elements // out.shape[0], out.stride(0)
        grid, short = (triton.cdiv(size, BLOCK),), run + 8 * BLOCK < 2**31
        eights = run % 8 == 0 and apart % 8 == 0 and wire.data_ptr() % (8 * wire.element_size()) == 0
        _unpack[grid](planes, wire, elements, size, run, apart, low, planes.shape[0], BLOCK, short, eights)


if triton is not None:  # its parser looks annotations up: only tl's may stand in a kernel

    @triton.jit  # type: ignore[untyped-decorator]
    def _pack(x, planes, elements, size, low, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place = tl.arange(0, 8)
        at = byte[:, None] * 8 + place[None, :]
        code = tl.load(x + at, mask=at < elements, other=low).to(tl.int32) - low
        for plane in tl.static_range(WIDTH):
            bit = ((code >> plane) & 1) << place[None, :]
            tl.store(planes + plane * size + byte, tl.sum(bit, axis=1).to(tl.uint8), mask=byte < size)

    @triton.jit  # type: ignore[untyped-decorator]
    def _unpack(  # type: ignore[no-untyped-def]
        planes, out, n, size, run, apart, low,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, EIGHTS: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0).to(tl.int64) * BLOCK
        byte = first + tl.arange(0, BLOCK)
        place = tl.arange(0, 8)
        at = byte[:, None] * 8 + place[None, :]
        code = tl.zeros((BLOCK, 8), dtype=tl.int32)
        for plane in tl.static_range(WIDTH):
            held = tl.load(planes + plane * size + byte, mask=byte < size, other=0).to(tl.int32)
            code |= ((held[:, None] >> place[None, :]) & 1) << plane
        # one division of 64 bits a program; the others are of 32, if a run is not longer
        row = first * 8 // run
        if EIGHTS:  # the eight numbers of a byte lie side by side, and go in one store
            inside = first * 8 - row * run + (byte - first) * 8
        else:
            inside = first * 8 - row * run + (at - first * 8)
        if SHORT:
            inside = inside.to(tl.int32)
        more = inside // run
        to = (row + more) * apart + (inside - more * run)
        if EIGHTS:
            to = tl.multiple_of(to, 8)[:, None] + place[None, :]
            kept = (byte * 8 < n)[:, None]
        else:
            kept = at < n
        tl.store(out + to, (code + low).to(out.dtype.element_ty), mask=kept)
