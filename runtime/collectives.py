"""The collectives of a graph over torch process groups (`ops.Collectives`), with the gradients that `ops` states.

Each collective is an `autograd.Function` which holds its process group, so that backward needs no global state. Pieces
may have different sizes on the ranks: a gather pads them to the longest and cuts the padding away. gloo's
reduce-scatter moves as many bytes as its all-reduce (torch 2.11 to 2.14): on the CPU the ranks exchange their parts
instead, half as many bytes, and add them up; for a GPU's tensors it is an all-reduce and the rank's own slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from snnpart.bits import States
from snnpart.facts import Pieces
from snnpart.ops import select_pieces
from snnpart.runtime.kernels.bits import pack, unpack


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


def over_nccl(axis: Axis, device: torch.device) -> bool:
    """Whether tensors of the device travel along the axis by NCCL, which scatters sums and averages.

    `dist.get_backend` does not say it of a group that has a backend for each kind of device, as those of a launch do.
    """
    return device.type == "cuda" and axis.group is not None and "nccl" in str(dist.get_backend_config(axis.group))


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """A new tensor, in x's layout: the sum of x over the ranks of the axis. Not differentiable.

    A gradient may lie otherwise on another rank, and a sum is one of memory: it is made of contiguous values.
    """
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if axis.group is not None and total.numel():
        dist.all_reduce(total, group=axis.group)
    return total.contiguous(memory_format=_dense(x))


def _dense(x: Tensor) -> torch.memory_format:
    """Channels-last where x lies so; else contiguous."""
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def scatter_sum_over(x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces]) -> Tensor:
    """This rank's pieces of `dim` of the sum of x over the ranks, contiguous. Not differentiable."""
    scatters = over_nccl(axis, x.device)
    if axis.group is None or not (scatters or x.device.type == "cpu"):
        return select_pieces(sum_over(x, axis), dim, pieces[axis.index]).clone(memory_format=torch.contiguous_format)
    sizes = [sum(stop - start for start, stop in held) for held in pieces]
    source = x.detach().movedim(dim, 0)
    if not scatters:
        return _exchanged(source, axis, pieces, sizes).movedim(0, dim).contiguous()
    parts = source.new_zeros((axis.size, max(sizes), *source.shape[1:]))
    for part, held, size in zip(parts, pieces, sizes, strict=True):
        part[:size] = select_pieces(source, 0, held)
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=axis.group)
    return own[: sizes[axis.index]].movedim(0, dim).contiguous()


def _exchanged(source: Tensor, axis: Axis, pieces: Sequence[Pieces], sizes: list[int]) -> Tensor:
    """The sum over ranks of this rank's pieces of dim 0: every rank sends each other one its part."""
    sent = torch.cat([select_pieces(source, 0, held) for held in pieces])
    own = sizes[axis.index]
    got = sent.new_empty((axis.size, own, *sent.shape[1:]))
    if sent.numel():
        dist.all_to_all_single(got.flatten(0, 1), sent, [own] * axis.size, sizes, group=axis.group)
    return got.sum(0, dtype=got.dtype)


def gather_over(x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces], states: States | None = None) -> Tensor:
    """The whole value from the ranks' pieces of `dim`, contiguous. Not differentiable.

    Args:
        x: this rank's pieces, one after the other along `dim`.
        pieces: for each rank of the axis the intervals of the whole dim that it holds.
        states: send x as bits, see `snnpart.bits`.
    """
    if axis.group is None:
        return x.detach().contiguous()
    sizes = [sum(stop - start for start, stop in held) for held in pieces]
    parts = _all_gather_padded(x.detach().movedim(dim, 0), axis, max(sizes), states)
    shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_dense(x))
    for part, held in zip(parts, pieces, strict=True):
        offset = 0
        for start, stop in held:
            whole.narrow(dim, start, stop - start).copy_(part[offset : offset + stop - start].movedim(0, dim))
            offset += stop - start
    return whole


def _all_gather_padded(x: Tensor, axis: Axis, length: int, states: States | None) -> tuple[Tensor, ...]:
    """x of every rank, padded along dim 0 to `length`. Booleans travel as bytes, which every backend can gather."""
    local = x.new_full((length, *x.shape[1:]), states[0] if states and x.dtype is not torch.bool else 0)
    local[: x.shape[0]] = x
    if states is not None:
        wire = pack(local, states)
    else:
        wire = local.view(torch.uint8) if local.dtype is torch.bool else local
    parts = [torch.empty_like(wire) for _ in axis.ranks]
    if wire.numel():
        dist.all_gather(parts, wire, group=axis.group)
    if states is not None:
        return tuple(unpack(part, local.numel(), states, local.dtype).view(local.shape) for part in parts)
    return tuple(part.view(local.dtype) for part in parts)


class AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return sum_over(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class GradAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return sum_over(grads[0], ctx.axis), None


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces], states: States | None, partial: bool
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.pieces, ctx.partial = axis, dim, pieces, partial
        return gather_over(x, axis, dim, pieces, states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.partial:
            grad = scatter_sum_over(grads[0], ctx.axis, ctx.dim, ctx.pieces)
        else:
            grad = select_pieces(grads[0], ctx.dim, ctx.pieces[ctx.axis.index]).contiguous()
        return grad, None, None, None, None, None


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
        return scatter_sum_over(x, axis, dim, pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_over(grads[0], ctx.axis, ctx.dim, ctx.pieces), None, None, None


@dataclass(frozen=True, slots=True)
class GroupCollectives:
    """`ops.Collectives` over the process groups of the mesh axes."""

    axes: Mapping[str, Axis]

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        result: Tensor = AllReduce.apply(x, self.axes[axis])
        return result

    def grad_all_reduce(self, x: Tensor, axis: str) -> Tensor:
        result: Tensor = GradAllReduce.apply(x, self.axes[axis])
        return result

    def all_gather(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        pieces: Sequence[Pieces],
        states: States | None = None,
        partial: bool = False,
    ) -> Tensor:
        result: Tensor = _AllGather.apply(x, self.axes[axis], dim % x.dim(), pieces, states, partial)
        return result

    def shard(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        result: Tensor = _Shard.apply(x, self.axes[axis], dim % x.dim(), pieces)
        return result

    def reduce_scatter(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces]) -> Tensor:
        result: Tensor = _ReduceScatter.apply(x, self.axes[axis], dim % x.dim(), pieces)
        return result
