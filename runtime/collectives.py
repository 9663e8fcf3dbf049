"""The collectives of a graph over torch process groups (`ops.Collectives`), with the gradients that `ops` states.

Each collective is an `autograd.Function` which holds its process group, so that backward needs no global state. Pieces
may have different sizes on the ranks: a gather pads them to the longest and cuts the padding away. gloo's
reduce-scatter moves as many bytes as its all-reduce (torch 2.11 to 2.14): on the CPU the ranks exchange their parts
instead, half as many bytes, and add them up; for a GPU's tensors it is an all-reduce and the rank's own slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from snnpart import compat
from snnpart.bits import States
from snnpart.facts import Pieces
from snnpart.ops import select_pieces
from snnpart.ops_later import compute_put_off
from snnpart.runtime.kernels.bits import pack, unpack, unpack_into
from snnpart.runtime.kernels.layout import copy_laid

Work = Callable[[], None]


def nothing() -> None:
    """What is done meanwhile, if nothing is."""


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


class _Order:
    """A value in the order in which it travels, which all ranks must agree on: its dims as they stand, or with the dim
    `last` behind the others. It is seen as [outer, size, inner], where `size` is that of the dim `dim`: a rank's piece
    of it is one run of numbers in each of `outer`."""

    def __init__(self, shape: Sequence[int], dim: int, last: int | None) -> None:
        self._order = [i for i in range(len(shape)) if i != last] + ([] if last is None else [last])
        self._at = self._order.index(dim)
        self._shape = [shape[i] for i in self._order]
        self.outer, self.inner = prod(self._shape[: self._at]), prod(self._shape[self._at + 1 :])

    def runs(self, x: Tensor) -> Tensor:
        """x as contiguous [outer, size, inner], a view where it lies so."""
        ordered = x.permute(self._order)
        return ordered.contiguous().view(self.outer, ordered.shape[self._at], self.inner)

    def new(self, like: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """An empty value of so many in `dim`, and its memory as [outer, size, inner]. It is no view of the latter:
        what an autograd function gives back may then be changed in place."""
        shape = [*self._shape[: self._at], size, *self._shape[self._at + 1 :]]
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        back = [self._order.index(i) for i in range(len(shape))]
        made = torch.empty_strided(
            [shape[i] for i in back], [strides[i] for i in back], dtype=like.dtype, device=like.device
        )
        return made, made.permute(self._order).view(self.outer, size, self.inner)


def _sizes(pieces: Sequence[Pieces]) -> list[int]:
    return [sum(stop - start for start, stop in held) for held in pieces]


def sum_over(x: Tensor, axis: Axis, last: int | None = None, meanwhile: Work = nothing) -> Tensor:
    """A new tensor, in x's layout: the sum of x over the ranks of the axis. Not differentiable. `meanwhile` is called
    while the sum is under way.

    A gradient may lie otherwise on another rank, and a sum is one of memory: it is made of contiguous values, or of
    values whose dim `last` lies behind the others.
    """
    x = x.detach()
    if last is None:
        total = x.clone(memory_format=torch.contiguous_format)
        memory = total
    else:
        total, memory = _Order(x.shape, last, last).new(x, x.shape[last])
        total.copy_(x)
    if axis.group is not None and total.numel():
        under_way = dist.all_reduce(memory, group=axis.group, async_op=True)
        meanwhile()
        under_way.wait()  # type: ignore[union-attr]
    return total if last is not None else total.contiguous(memory_format=_dense(x))


def _dense(x: Tensor) -> torch.memory_format:
    """Channels-last where x lies so; else contiguous."""
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def scatter_sum_over(
    x: Tensor,
    axis: Axis,
    dim: int,
    pieces: Sequence[Pieces],
    last: int | None = None,
    meanwhile: Work = nothing,
) -> Tensor:
    """This rank's pieces of `dim` of the sum of x over the ranks, contiguous, or with the dim `last` behind the others.
    Not differentiable. `meanwhile` is called while the sum is under way."""
    x = x.detach()
    if axis.group is None:
        return _own(x, axis, dim, pieces, last)
    order, me = _Order(x.shape, dim, last), axis.index
    own, memory = order.new(x, _sizes(pieces)[me])
    source = order.runs(x)
    if over_nccl(axis, x.device):
        _scattered(source, axis, pieces, memory, meanwhile)
    elif x.device.type == "cpu":
        _exchanged(source, axis, pieces, memory, meanwhile)
    else:
        memory.copy_(select_pieces(sum_over(source, axis, meanwhile=meanwhile), 1, pieces[me]))
    return own


def _scattered(source: Tensor, axis: Axis, pieces: Sequence[Pieces], own: Tensor, meanwhile: Work) -> None:
    """Put the sum over ranks of this rank's pieces of dim 1 into `own`. Every rank's part is as long as the longest."""
    sizes = _sizes(pieces)
    unit = source.shape[0] * source.shape[2]
    parts = source.new_empty((axis.size, unit * max(sizes)))
    for part, held, size in zip(parts, pieces, sizes, strict=True):
        part[unit * size :].zero_()
        copy_laid(part[: unit * size].view(source.shape[0], size, source.shape[2]), select_pieces(source, 1, held))
    even = sizes[axis.index] == max(sizes)
    summed = own.view(-1) if even else torch.empty_like(parts[0])
    if parts.numel():
        under_way = compat.sum_into(summed, parts.view(-1), axis.group)
        meanwhile()
        under_way.wait()
    if not even:
        own.copy_(summed[: own.numel()].view(own.shape))


def _exchanged(source: Tensor, axis: Axis, pieces: Sequence[Pieces], own: Tensor, meanwhile: Work) -> None:
    """Put the sum over ranks of this rank's pieces of dim 1 into `own`: every rank sends each other one its part."""
    lengths = [source.shape[0] * size * source.shape[2] for size in _sizes(pieces)]
    sent = torch.cat([select_pieces(source, 1, held).flatten() for held in pieces])
    got = sent.new_empty((axis.size, own.numel()))
    if sent.numel():
        counts = [own.numel()] * axis.size
        under_way = dist.all_to_all_single(got.view(-1), sent, counts, lengths, group=axis.group, async_op=True)
        meanwhile()
        under_way.wait()  # type: ignore[union-attr]
    torch.sum(got, 0, dtype=got.dtype, out=own.view(-1))


def gather_over(
    x: Tensor,
    axis: Axis,
    dim: int,
    pieces: Sequence[Pieces],
    states: States | None = None,
    last: int | None = None,
) -> Tensor:
    """The whole value from the ranks' pieces of `dim`. Not differentiable.

    Args:
        x: this rank's pieces, one after the other along `dim`.
        pieces: for each rank of the axis the intervals of the whole dim that it holds.
        states: send x as bits, see `snnpart.bits`.
        last: the dim that lies behind the others in memory; without it the result lies as x does.
    """
    x, order, sizes = x.detach(), _Order(x.shape, dim, last), _sizes(pieces)
    whole, memory = order.new(x, sum(sizes))
    if axis.group is None:
        memory.copy_(order.runs(x))
    elif whole.numel():
        unit = order.outer * order.inner
        parts = _all_gather_padded(order.runs(x).view(-1), axis, unit * max(sizes), states)
        for part, held, size in zip(parts, pieces, sizes, strict=True):
            _put(part, memory, held, size, states)
    return whole if last is not None else whole.contiguous(memory_format=_dense(x))


def _all_gather_padded(x: Tensor, axis: Axis, length: int, states: States | None) -> Tensor:
    """x [n] of every rank as it travels, padded to `length`: [ranks, ...]. Booleans are bytes, which every backend can
    gather."""
    if x.numel() < length:
        padded = x.new_full((length,), states[0] if states and x.dtype is not torch.bool else 0)
        padded[: x.numel()] = x
        x = padded
    if states is not None:
        wire = pack(x, states)
    else:
        wire = x.view(torch.uint8) if x.dtype is torch.bool else x
    parts = wire.new_empty((axis.size, *wire.shape))
    compat.gather_into(parts.view(-1), wire.view(-1), axis.group).wait()
    return parts


def _put(part: Tensor, whole: Tensor, held: Pieces, size: int, states: States | None) -> None:
    """Put one rank's part, as it travelled, to its places in `whole` [outer, sizes, inner]."""
    outer, _, inner = whole.shape
    if states is not None and len(held) == 1:
        unpack_into(part, whole[:, held[0][0] : held[0][1]], states)
        return
    length = outer * size * inner
    flat = part[:length].view(whole.dtype) if states is None else unpack(part, length, states, whole.dtype)
    own, offset = flat.view(outer, size, inner), 0
    for start, stop in held:
        copy_laid(whole[:, start:stop], own[:, offset : offset + stop - start])
        offset += stop - start


class AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, last: int | None = None) -> Tensor:
        return sum_over(x, axis, last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class GradAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, last: int | None = None) -> Tensor:
        ctx.axis, ctx.last = axis, last
        return compat.own_view(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return sum_over(grads[0], ctx.axis, ctx.last, compute_put_off), None, None


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        dim: int,
        pieces: Sequence[Pieces],
        states: States | None,
        partial: bool,
        last: int | None,
    ) -> Tensor:
        ctx.at, ctx.partial = (axis, dim, pieces, last), partial
        return gather_over(x, axis, dim, pieces, states, last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.partial:
            axis, dim, pieces, last = ctx.at
            grad = scatter_sum_over(grads[0], axis, dim, pieces, last, compute_put_off)
        else:
            grad = _own(grads[0], *ctx.at)
        return grad, None, None, None, None, None, None


def _own(x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces], last: int | None) -> Tensor:
    """A copy of this rank's pieces."""
    own, _ = _Order(x.shape, dim, last).new(x, _sizes(pieces)[axis.index])
    return own.copy_(select_pieces(x, dim, pieces[axis.index]))


class _Shard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces], last: int | None) -> Tensor:
        ctx.at = axis, dim, pieces, last
        return _own(x, axis, dim, pieces, last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gathered(grads[0], *ctx.at), None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces], last: int | None) -> Tensor:
        ctx.at = axis, dim, pieces, last
        return scatter_sum_over(x, axis, dim, pieces, last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gathered(grads[0], *ctx.at), None, None, None, None


def _gathered(x: Tensor, axis: Axis, dim: int, pieces: Sequence[Pieces], last: int | None) -> Tensor:
    return gather_over(x, axis, dim, pieces, None, last)


@dataclass(frozen=True, slots=True)
class GroupCollectives:
    """`ops.Collectives` over the process groups of the mesh axes."""

    axes: Mapping[str, Axis]

    def all_reduce(self, x: Tensor, axis: str, last: int | None = None) -> Tensor:
        result: Tensor = AllReduce.apply(x, self.axes[axis], last)
        return result

    def grad_all_reduce(self, x: Tensor, axis: str, last: int | None = None) -> Tensor:
        result: Tensor = GradAllReduce.apply(x, self.axes[axis], last)
        return result

    def all_gather(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        pieces: Sequence[Pieces],
        states: States | None = None,
        partial: bool = False,
        last: int | None = None,
    ) -> Tensor:
        result: Tensor = _AllGather.apply(x, self.axes[axis], dim % x.dim(), pieces, states, partial, last)
        return result

    def shard(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces], last: int | None = None) -> Tensor:
        result: Tensor = _Shard.apply(x, self.axes[axis], dim % x.dim(), pieces, last)
        return result

    def reduce_scatter(
        self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces], last: int | None = None
    ) -> Tensor:
        result: Tensor = _ReduceScatter.apply(x, self.axes[axis], dim % x.dim(), pieces, last)
        return result
