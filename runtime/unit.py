"""One unit of FSDP2: parameters that are gathered together and whose gradients are reduced together.

A rank of n holds rows [r c, (r + 1) c) of dim 0 of every parameter, c = ceil(rows / n): what FSDP2's DTensors hold, so
optimizers, states and checkpoints see DTensors. In memory the rows of a unit lie one after the other:

    held   this rank's rows, parameter after parameter, each padded to c rows     what the DTensors are views of
    wire   [n, row]: the ranks' `held` after an all-gather, in bytes              lives from `start` to `finish`
    whole  the parameters that the graph reads; without memory while they are sharded
    sent   [n, row]: gradients on their way into a reduce-scatter

A gather is one collective whatever the dtypes. Parameters that the graph only reads in operations which autocast runs
in half precision are gathered in that, at half the bytes: rounding before the gather or after it is the same. Their
gradients arrive in half precision, are summed over microbatches in that of the parameter, and reduced in it.

The tensors that the graph reads are always the same objects: only the memory behind them, one piece for those of a
unit that are read in one precision, comes and goes. So autograd keeps them without it, hooks on them run, and layers
that hold them need not be told. It is written through `.data`, which autograd's count of writes does not see: the
numbers are those that it has kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from snnpart import compat
from snnpart.runtime.buckets import in_memory_order
from snnpart.runtime.collectives import Axis, over_nccl

_ALIGNED = 128
"""Bytes at whose multiples parameters and their rows begin: a line of a GPU's cache."""


class Memory:
    """Tensors one after the other in one piece of memory, which comes and goes. They begin with it."""

    def __init__(self, likes: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        """Tensors with sizes and strides of `likes`, and their dtype if no other is said."""
        dtypes = [dtype or like.dtype for like in likes]
        sizes = [like.numel() * kind.itemsize for like, kind in zip(likes, dtypes, strict=True)]
        starts = [0, *accumulate(map(aligned, sizes))]
        self._base = torch.empty(starts[-1], dtype=torch.uint8, device=likes[0].device)
        self.tensors = [
            self._base[start : start + size].view(kind).as_strided(like.size(), like.stride())
            for like, kind, start, size in zip(likes, dtypes, starts, sizes, strict=False)
        ]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return self._base.numel()

    @property
    def held(self) -> int:
        """Bytes that are there now."""
        return self._base.untyped_storage().nbytes()

    def take(self) -> None:
        self._base.untyped_storage().resize_(self.bytes)

    def give_back(self) -> None:
        self._base.untyped_storage().resize_(0)


@dataclass(eq=False)
class Member:
    """A parameter of a unit: what the graph reads, and this rank's rows of it.

    `narrow` takes the place of `whole` under autocast where it may (`rounds`); `kept` are gradients that it left.
    """

    name: str
    whole: nn.Parameter
    shard: nn.Parameter
    chunk: int
    start: int
    rounds: bool = False
    narrow: nn.Parameter | None = None
    kept: Tensor | None = None

    @property
    def read(self) -> tuple[nn.Parameter, ...]:
        """What the graph may read."""
        return (self.whole,) if self.narrow is None else (self.whole, self.narrow)

    def pieces(self, ranks: int) -> list[tuple[int, int]]:
        """The numbers that each rank holds, as intervals of the parameter's memory."""
        size, chunk = self.whole.numel(), self.chunk
        return [(min(r * chunk, size), min((r + 1) * chunk, size)) for r in range(ranks)]

    def take_gradient(self) -> Tensor | None:
        """The gradient that backward left, in the order in which the parameter lies in memory [numel]."""
        self.keep()
        found, self.kept = self.kept, None
        return None if found is None else in_memory_order(found, self.whole)

    def keep(self) -> None:
        """Add what backward left on `narrow` to what earlier ones did, in the parameter's own precision.

        What it left on `whole` autograd adds up itself.
        """
        for parameter in self.read:
            if parameter.grad is not None:
                more, parameter.grad = parameter.grad, None
                self.kept = more if self.kept is None else self.kept.to(self.whole.dtype).add_(more)

    @property
    def has_gradient(self) -> bool:
        return self.kept is not None or any(parameter.grad is not None for parameter in self.read)


@dataclass(eq=False)
class _Reduction:
    """Gradients on their way: of `members`, whose rows lie in `own` at the end. `sent` is what they are taken from."""

    members: Sequence[Member]
    sent: Tensor | None
    own: Tensor
    work: Any
    share: float
    """What the sum is multiplied by where the backend does not average."""

    def settle(self) -> None:
        """Wait for the gradients, and let go of what was sent."""
        if self.work is not None:
            self.work.wait()
            self.own = self.own if self.share == 1.0 else self.own * self.share
            self.sent = self.work = None


@dataclass(eq=False)
class Unit:
    """See above. Everything in it is collective over dp and must be called in the same order on all ranks."""

    number: int
    members: Sequence[Member]
    held: Tensor
    axis: Axis
    memories: Mapping[bool, Memory]
    """That of the members which autocast does not round, and of those that it does."""
    waiting: int = 0
    """Gradients that this backward has not made yet."""
    expected: frozenset[str] = frozenset()
    """Parameters that a loss reaches, as far as it is known."""
    sent: frozenset[str] = frozenset()
    """Parameters whose gradients of this step are on their way."""
    half: torch.dtype | None = None
    """The precision of what autocast rounds; None without autocast."""
    _half: Memory | None = None
    _row: Tensor | None = None
    _out: Tensor | None = None
    _work: Any = None
    _whole: bool = True
    _reductions: list[_Reduction] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(member.name for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Whether the parameters have memory."""
        return self._whole

    @property
    def is_reduced(self) -> bool:
        """Whether gradients of this step are on their way, or there."""
        return bool(self._reductions)

    @property
    def is_coming(self) -> bool:
        """Whether a gather is under way."""
        return self._work is not None

    def start(self) -> None:
        """Begin to gather the parameters, unless they are there or on their way."""
        if self._whole or self.is_coming:
            return
        self._row = self.row()
        self._out = self._row.new_empty(self.axis.size * self._row.numel())
        self._work = compat.gather_into(self._out, self._row, self.axis.group)

    def gather(self) -> None:
        """Have the parameters whole."""
        if self._whole:
            return
        self.start()
        self._work.wait()
        out, self._out, self._row, self._work, self._whole = self._out, None, None, None, True
        assert out is not None
        out = out.view(self.axis.size, -1)
        for memory in self._memories():
            memory.take()
        into, come = [], []
        for member, read, offset in self._places():
            flat = read.data.as_strided((read.numel(),), (1,))
            width = member.chunk * read.element_size()
            rows = out[:, offset : offset + width].view(read.dtype)
            for rank, (first, last) in enumerate(member.pieces(self.axis.size)):
                if last > first:
                    into.append(flat[first:last])
                    come.append(rows[rank, : last - first])
        compat.copy_many(into, come)

    def free(self) -> None:
        """Give the memory of the whole parameters back."""
        if not self._whole and self._work is None:
            return
        if self._work is not None:
            self._work.wait()
        self._out, self._row, self._work, self._whole = None, None, None, False
        for memory in self._memories():
            memory.give_back()

    def round(self, half: torch.dtype | None) -> None:
        """Gather what autocast rounds in this precision from now on; None: in its own."""
        self.free()
        self.half = half
        rounding = [member for member in self.members if member.rounds]
        if half is not None and rounding and (rounding[0].narrow is None or rounding[0].narrow.dtype is not half):
            self._half = Memory([member.whole for member in rounding], half)
            for member, tensor in zip(rounding, self._half.tensors, strict=True):
                member.narrow = nn.Parameter(tensor)
            self._half.give_back()

    def _memories(self) -> list[Memory]:
        """What the graph reads now."""
        rounded = {} if self.half is None or self._half is None else {True: self._half}
        return list({**self.memories, **rounded}.values())

    def _places(self) -> Iterator[tuple[Member, nn.Parameter, int]]:
        """Each member with what the graph reads of it now and where its rows begin in a rank's wire, in bytes."""
        offset = 0
        for member in self.members:
            read = member.narrow if self.half is not None and member.narrow is not None else member.whole
            yield member, read, offset
            offset += aligned(member.chunk * read.element_size())

    def row(self) -> Tensor:
        """What this rank sends into a gather, as bytes."""
        places = list(self._places())
        if all(read is member.whole for member, read, _ in places):
            return self.held
        _, last, end = places[-1]
        row = self.held.new_empty(end + aligned(places[-1][0].chunk * last.element_size()))
        into = [row[at : at + m.chunk * r.element_size()].view(r.dtype) for m, r, at in places]
        compat.copy_many(into, [rows_of(self.held, member) for member, _, _ in places])
        return row

    def reduce(self) -> None:
        """Send the gradients that are there on their way; where a member has none, zeros go."""
        self.sent |= {member.name for member in self.members if member.has_gradient}
        for dtype in dict.fromkeys(member.whole.dtype for member in self.members):
            self._reduce([member for member in self.members if member.whole.dtype is dtype])

    def _reduce(self, members: Sequence[Member]) -> None:
        """The members have one dtype."""
        size, itemsize = self.axis.size, members[0].whole.element_size()
        width = sum(aligned(member.chunk * itemsize) // itemsize for member in members)
        like = members[0].whole
        sent = torch.empty((size, width), dtype=like.dtype, device=like.device)
        into: list[Tensor] = []
        come: list[Tensor] = []
        offset = 0
        for member in members:
            grad = member.take_gradient()
            if grad is None:
                sent[:, offset : offset + member.chunk].zero_()
            for rank, (first, last) in enumerate(member.pieces(size) if grad is not None else ()):
                if last > first and grad is not None:
                    into.append(sent[rank, offset : offset + last - first])
                    come.append(grad[first:last])
            offset += aligned(member.chunk * itemsize) // itemsize
        compat.copy_many(into, come)
        self._reductions.append(_scattered(members, sent, self.axis))

    def settle(self) -> None:
        """Wait for the gradients that are on their way."""
        for reduction in self._reductions:
            reduction.settle()

    def finish(self, reached: frozenset[str]) -> None:
        """Wait for the gradients; those of the `reached` members are added to their shards'."""
        self.settle()
        for reduction in self._reductions:
            own, offset, itemsize = reduction.own, 0, reduction.own.element_size()
            for member in reduction.members:
                if member.name in reached:
                    _give(member, own[offset : offset + member.chunk])
                offset += aligned(member.chunk * itemsize) // itemsize
        self._reductions, self.sent, self.expected = [], frozenset(), self.names & reached

    def forget(self) -> None:
        """Drop whatever is under way."""
        self.free()
        self._reductions, self.sent, self.expected, self.waiting = [], frozenset(), self.names, 0
        for member in self.members:
            member.keep()
            member.kept = None


def _scattered(members: Sequence[Member], sent: Tensor, axis: Axis) -> _Reduction:
    """A reduce-scatter under way; not every other backend has one, they sum everything."""
    if over_nccl(axis, sent.device):
        own = torch.empty_like(sent[0])
        return _Reduction(members, sent, own, compat.average_into(own, sent.view(-1), axis.group), 1.0)
    work = dist.all_reduce(sent, group=axis.group, async_op=True)
    return _Reduction(members, sent, sent[axis.index], work, 1.0 / axis.size)


def _give(member: Member, row: Tensor) -> None:
    """Add a gradient's rows to what the shard has."""
    grad = _as_rows(row, member)
    if member.shard.grad is not None:
        member.shard.grad.to_local().add_(grad)  # type: ignore[attr-defined]
    else:
        member.shard.grad = _distributed(grad, member.whole, member.shard.device_mesh)  # type: ignore[attr-defined]


def _as_rows(row: Tensor, member: Member) -> Tensor:
    """Consecutive numbers as this rank's rows of a parameter: its shape and order of dims, but for the first."""
    shape = member.shard.to_local().shape  # type: ignore[attr-defined]
    return row[: shape.numel()].as_strided(shape, member.whole.stride(), row.storage_offset())


def _distributed(local: Tensor, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.size(), stride=whole.stride())


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // _ALIGNED) * _ALIGNED


def rows_of(held: Tensor, member: Member) -> Tensor:
    """A member's rows in `held`, padded to the rows of every rank [chunk]."""
    width = member.chunk * member.whole.element_size()
    return held[member.start : member.start + width].view(member.whole.dtype)


def make_unit(number: int, parameters: Sequence[tuple[str, nn.Parameter, bool]], axis: Axis, mesh: DeviceMesh) -> Unit:
    """Cut parameters; from now on they have no memory of their own.

    Args:
        parameters: name, the parameter, dim 0 outermost in memory, and whether autocast may round it.
    """
    chunks = [-(-p.shape[0] // axis.size) * (p.numel() // p.shape[0]) for _, p, _ in parameters]
    sizes = [aligned(chunk * p.element_size()) for chunk, (_, p, _) in zip(chunks, parameters, strict=True)]
    starts = [0, *accumulate(sizes)]
    held = torch.zeros(starts[-1], dtype=torch.uint8, device=parameters[0][1].device)
    members = []
    for (name, whole, rounds), chunk, start in zip(parameters, chunks, starts, strict=False):
        members.append(_cut(Member(name, whole, whole, chunk, start, rounds), held, mesh))
    memories = {}
    for rounds in dict.fromkeys(member.rounds for member in members):
        alike = [member.whole for member in members if member.rounds is rounds]
        memories[rounds] = Memory(alike)
        for whole, tensor in zip(alike, memories[rounds].tensors, strict=True):
            whole.data = tensor
    unit = Unit(number, members, held, axis, memories, expected=frozenset(member.name for member in members))
    unit.free()
    return unit


def _cut(member: Member, held: Tensor, mesh: DeviceMesh) -> Member:
    """The member, its rows copied to `held`."""
    whole = member.whole
    first, last = member.pieces(mesh.size())[mesh.get_local_rank()]
    rows = rows_of(held, member)[: last - first]
    rows.copy_(whole.data.as_strided((whole.numel(),), (1,))[first:last])
    shape = ((last - first) * whole.shape[0] // whole.numel(), *whole.shape[1:])
    local = rows.as_strided(shape, whole.stride(), rows.storage_offset())
    member.shard = nn.Parameter(_distributed(local, whole, mesh), requires_grad=True)
    return member
