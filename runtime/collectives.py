"""The collectives of a graph over torch process groups (`ops.Collectives`), with the gradients that `ops` states.

Each collective is an `autograd.Function` which holds its process group, so that backward needs no global state. Pieces
may have different sizes on the ranks: a gather pads them to the longest and cuts the padding away. gloo cannot
reduce-scatter every dtype, so `reduce_scatter` is an all-reduce followed by the rank's own slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from snnpart.facts import Pieces
from snnpart.ops import select_pieces


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as a rank sees it: the process group along it (None: it has one rank) and the rank's index there.

    `ranks[i]` is the global rank of index i.
    """

    group: dist.ProcessGroup | None
    index: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """A new tensor: the sum of x over the ranks of the axis. Not differentiable."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if axis.group is not None and total.numel():
        dist.all_reduce(total, group=axis.group)
    return total


def gather_over(x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces]) -> Tensor:
    """The whole value from the ranks' pieces of `dim`, contiguous. Not differentiable.

    Args:
        x: this rank's pieces, one after the other along `dim`.
        pieces: for each rank of the axis the intervals of the whole dim that it holds.
    """
    if axis.group is None:
        return x.detach().contiguous()
    sizes = [sum(stop - start for start, stop in held) for held in pieces]
    parts = _all_gather_padded(x.detach().movedim(dim, 0), axis, max(sizes))
    whole = x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
    for part, held in zip(parts, pieces, strict=True):
        offset = 0
        for start, stop in held:
            whole.narrow(dim, start, stop - start).copy_(part[offset : offset + stop - start].movedim(0, dim))
            offset += stop - start
    return whole


def _all_gather_padded(x: Tensor, axis: Axis, length: int) -> tuple[Tensor, ...]:
    """x of every rank, padded along dim 0 to `length`. Booleans travel as bytes, which every backend can gather."""
    local = x.new_zeros((length, *x.shape[1:]))
    local[: x.shape[0]] = x
    wire = local.view(torch.uint8) if local.dtype is torch.bool else local
    parts = [torch.empty_like(wire) for _ in axis.ranks]
    if wire.numel():
        dist.all_gather(parts, wire, group=axis.group)
    return tuple(part.view(local.dtype) for part in parts)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return sum_over(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _GradAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return sum_over(grads[0], ctx.axis), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        ctx.dim, ctx.own = dim, pieces[axis.index]
        return gather_over(x, axis, dim, pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return select_pieces(grads[0], ctx.dim, ctx.own).contiguous(), None, None, None


class _Shard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        ctx.axis, ctx.dim, ctx.pieces = axis, dim, pieces
        return select_pieces(x, dim, pieces[axis.index]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_over(grads[0], ctx.axis, ctx.dim, ctx.pieces), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        ctx.axis, ctx.dim, ctx.pieces = axis, dim, pieces
        return select_pieces(sum_over(x, axis), dim, pieces[axis.index]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_over(grads[0], ctx.axis, ctx.dim, ctx.pieces), None, None, None


@dataclass(frozen=True, slots=True)
class GroupCollectives:
    """`ops.Collectives` over the process groups of the mesh axes."""

    axes: Mapping[str, Axis]

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        result: Tensor = _AllReduce.apply(x, self.axes[axis])
        return result

    def grad_all_reduce(self, x: Tensor, axis: str) -> Tensor:
        result: Tensor = _GradAllReduce.apply(x, self.axes[axis])
        return result

    def all_gather(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        result: Tensor = _AllGather.apply(x, self.axes[axis], dim % x.dim(), pieces)
        return result

    def shard(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        result: Tensor = _Shard.apply(x, self.axes[axis], dim % x.dim(), pieces)
        return result

    def reduce_scatter(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        result: Tensor = _ReduceScatter.apply(x, self.axes[axis], dim % x.dim(), pieces)
        return result
