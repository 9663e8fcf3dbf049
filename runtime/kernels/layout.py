"""Copies between two layouts, and the layouts that products of matrices can read.

torch copies what lies otherwise number by number: for 16-bit numbers a quarter of a GPU's bandwidth where the innermost
dim is the same on both sides, and less where it is not. Here the first are copied as fewer, wider numbers, and the
others by a kernel that turns tiles round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snnpart import ops_layout
from snnpart.runtime.kernels.available import runs_kernels

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_WIDE = (torch.complex128, torch.int64, torch.int32)
"""Types of 16, 8 and 4 bytes, in which numbers are copied together."""
_SIDE = 64
"""Of a tile that is turned round."""

if triton is not None:  # its parser looks annotations up: only tl's may stand in a kernel

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn_copy_kernel(  # type: ignore[no-untyped-def]
        source, to, rows, columns, inner, source_row, to_column, source_outer, source_inner, to_outer, to_inner,
        SIDE: tl.constexpr,
    ):  # fmt: skip
        across = tl.cdiv(columns, SIDE)
        tiles = tl.cdiv(rows, SIDE) * across
        tile = tl.program_id(0) % tiles
        outer = (tl.program_id(0) // tiles // inner).to(tl.int64)
        within = (tl.program_id(0) // tiles % inner).to(tl.int64)
        row = tile // across * SIDE + tl.arange(0, SIDE)
        column = tile % across * SIDE + tl.arange(0, SIDE)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        source += outer * source_outer + within * source_inner
        to += outer * to_outer + within * to_inner
        value = tl.load(source + row.to(tl.int64)[:, None] * source_row + column[None, :], mask=mask)
        tl.store(to + row[:, None] + column.to(tl.int64)[None, :] * to_column, value, mask=mask)


@dataclass(frozen=True)
class _Dim:
    """A dim that two tensors share: its size, and how far apart its numbers lie in each."""

    size: int
    source: int
    to: int

    def around(self, inner: _Dim) -> bool:
        """Whether both tensors have this dim right around the other, so that they are one."""
        return self.source == inner.size * inner.source and self.to == inner.size * inner.to


def copy_laid(to: Tensor, source: Tensor) -> None:
    """`to.copy_(source)` of the same shape and dtype, in whatever layouts. Not differentiable."""
    dims = _dims(to, source)
    reads, writes = _innermost(dims, "source"), _innermost(dims, "to")
    if to.dtype != source.dtype or reads is None or writes is None or _is_read_otherwise(source):
        to.copy_(source)
    elif reads is writes:
        _copy_runs(to, source, [dim for dim in dims if dim is not reads], reads)
    elif len(dims) > 4 or not runs_kernels(to):
        to.copy_(source)
    else:
        _turn(to, source, [dim for dim in dims if dim is not reads and dim is not writes], writes, reads)


def _is_read_otherwise(x: Tensor) -> bool:
    """Whether the numbers of x may be others than those in memory, as in the imaginary part of a conjugate."""
    return x.is_complex() or x.is_neg()


def _dims(to: Tensor, source: Tensor) -> list[_Dim]:
    """The dims of more than one, those that are one in both tensors merged."""
    found = [_Dim(*dim) for dim in zip(to.shape, source.stride(), to.stride(), strict=True) if dim[0] != 1]
    while pair := next(((a, b) for a in found for b in found if a is not b and a.around(b)), None):
        outer, inner = pair
        found[found.index(outer)] = _Dim(outer.size * inner.size, inner.source, inner.to)
        found.remove(inner)
    return found


def _innermost(dims: list[_Dim], which: str) -> _Dim | None:
    return next((dim for dim in dims if getattr(dim, which) == 1), None)


def _copy_runs(to: Tensor, source: Tensor, outer: list[_Dim], run: _Dim) -> None:
    """Both have the same innermost dim."""
    sizes = (*(dim.size for dim in outer), run.size)
    into = to.as_strided(sizes, (*(dim.to for dim in outer), 1))
    read = source.as_strided(sizes, (*(dim.source for dim in outer), 1))
    wide = next((dtype for dtype in _WIDE if _holds(into, dtype) and _holds(read, dtype)), to.dtype)
    into.view(wide).copy_(read.view(wide))


def _holds(x: Tensor, wide: torch.dtype) -> bool:
    """Whether the runs of x begin and end where such a wide number would."""
    size, width = x.element_size(), wide.itemsize
    places = (
        x.data_ptr(),
        x.storage_offset() * size,
        x.shape[-1] * size,
        *(stride * size for stride in x.stride()[:-1]),
    )
    return not any(place % width for place in places)


def _turn(to: Tensor, source: Tensor, outer: list[_Dim], rows: _Dim, columns: _Dim) -> None:
    """`to` has the dim `rows` innermost, the source the dim `columns`."""
    far, near = (*outer, _Dim(1, 0, 0), _Dim(1, 0, 0))[:2]
    tiles = triton.cdiv(rows.size, _SIDE) * triton.cdiv(columns.size, _SIDE)
    wire = (x.view(torch.uint8) if x.dtype is torch.bool else x for x in (source, to))
    _turn_copy_kernel[(far.size * near.size * tiles,)](
        *wire, rows.size, columns.size, near.size, rows.source, columns.to, far.source, near.source, far.to, near.to,
        _SIDE, num_warps=4,
    )  # fmt: skip


def laid(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """x in another layout: `make` gives an empty value of its shape and dtype. The gradient lies as it comes."""
    found: Tensor = _Laid.apply(x, make)
    return found


class _Laid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        made = make(x)
        copy_laid(made, x)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def channels_last(x: Tensor) -> Tensor:
    """`ops_layout.channels_last`, by a kernel on a GPU."""
    if not x.is_cuda or ops_layout.lies_last(x):
        return ops_layout.channels_last(x)
    return laid(x, ops_layout.empty_last)


def whole(x: Tensor | None) -> Tensor | None:
    """x for a kernel that reads its numbers one behind the other; a parameter may be a column of another."""
    return None if x is None else x.contiguous()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of stacks of matrices, which are put side by side first where they are not."""
    return torch.matmul(_stacked(a), _stacked(b))


def _stacked(x: Tensor) -> Tensor:
    """x [..., M, N] such that its matrices lie one behind the other. torch would copy it number by number, and turn
    each matrix so that its rows are whole, which a product does not need."""
    *outer, high, wide = zip(x.shape, x.stride(), strict=True)
    behind = [inner[0] * inner[1] for inner in outer[1:]]
    if not x.is_cuda or all(size == 1 or stride == far for (size, stride), far in zip(outer, behind, strict=False)):
        return x
    return laid(x, _empty_turned if high[1] < wide[1] else _empty)


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _empty_turned(x: Tensor) -> Tensor:
    """With the columns of its matrices whole in memory."""
    return x.new_empty(x.mT.shape).mT
