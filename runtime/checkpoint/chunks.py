"""What a rank holds of a tensor, as chunks with global offsets, in the form torch.distributed.checkpoint stores.

A tensor sharded over tp is a list of pieces along one dim (several where q, k and v lie fused), and FSDP2 cuts what a
tp rank holds again along dim 0. Each rectangle that results is one chunk. `Chunked` follows torch's chunk protocol
(`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`), which takes any rectangles; plain slices
saved under one name would silently keep rank 0's only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from snnpart.errors import CheckpointError
from snnpart.facts import Pieces

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in the whole tensor."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor: where it lies in the whole, and its numbers (a view of what the rank holds)."""

    offsets: tuple[int, ...]
    data: Tensor

    @property
    def box(self) -> Box:
        return self.offsets, tuple(self.data.shape)


class Chunked(Tensor):
    """A tensor of which this rank holds the chunks. It has the whole's shape and dtype, and no data of its own."""

    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> Chunked:
        made: Chunked = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))  # type: ignore[attr-defined]
        made.chunks = tuple(chunks)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Chunked({tuple(self.shape)}, {[chunk.box for chunk in self.chunks]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on the chunks of a checkpoint")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [self._write_item(fqn, chunk) for chunk in self.chunks]

    def _write_item(self, fqn: str, chunk: Chunk) -> WriteItem:
        offsets, sizes = torch.Size(chunk.offsets), chunk.data.shape
        return WriteItem(
            index=MetadataIndex(fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=self.dtype),
                size=self.shape,
            ),
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.data.shape) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset) if index.offset is not None else None
        for chunk in self.chunks:
            if offsets is None or chunk.offsets == offsets:
                return chunk.data
        raise CheckpointError(f"'{index.fqn}' has no chunk at {offsets} on this rank")


def chunks_of(local: Tensor, dim: int | None, pieces: Pieces, rows: tuple[int, int] | None = None) -> tuple[Chunk, ...]:
    """The chunks of what a rank holds.

    Args:
        local: this rank's numbers: the pieces one after another along `dim`, of those the rows `rows` of dim 0.
        dim: the dim that is sharded over tp; None: the tensor is whole.
        pieces: (start, end) in the whole, along `dim`.
        rows: what FSDP2 leaves on this rank of dim 0 of the tp rank's part; None: all of it.
    """
    first, last = rows if rows is not None else (0, local.shape[0] if local.dim() else 1)
    if dim is None:
        offsets = (first, *[0] * (local.dim() - 1)) if local.dim() else ()
        return (Chunk(offsets, local),) if local.numel() else ()
    return tuple(chunk for chunk in _along(local, dim, pieces, first, last) if chunk.data.numel())


def _along(local: Tensor, dim: int, pieces: Pieces, first: int, last: int) -> list[Chunk]:
    found, at = [], 0
    for start, end in pieces:
        low, high = (max(at, first), min(at + end - start, last)) if dim == 0 else (at, at + end - start)
        if low < high:
            offsets = [0] * local.dim()
            offsets[0] = first
            offsets[dim] = start + low - at
            found.append(Chunk(tuple(offsets), local.narrow(dim, low - (first if dim == 0 else 0), high - low)))
        at += end - start
    return found


def check_tiles(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """CheckpointError unless the boxes of all ranks cover the tensor exactly once."""
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"'{name}' of shape {tuple(shape)} has {math.prod(shape)} numbers, the ranks hold {covered} of it"
        )
    for box, other in _close(sorted(boxes)):
        if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *other, strict=True)):
            raise CheckpointError(f"'{name}': the chunks at {box[0]} and {other[0]} overlap")


def _close(boxes: Sequence[Box]) -> list[tuple[Box, Box]]:
    """Pairs that could overlap: all of them for few chunks; neighbours along a single cut dim for many."""
    cut = {dim for offsets, _ in boxes for dim, offset in enumerate(offsets) if offset}
    if len(cut) <= 1:
        return list(pairwise(boxes))
    return [(box, other) for i, box in enumerate(boxes) for other in boxes[i + 1 :]]


def check_all_tiles(everyone: Sequence[Mapping[str, tuple[tuple[int, ...], list[Box]]]]) -> None:
    """`check_tiles` of every tensor, from what each rank says it holds."""
    shapes = {name: shape for rank in everyone for name, (shape, _) in rank.items()}
    for name, shape in shapes.items():
        check_tiles(name, shape, [box for rank in everyone if name in rank for box in rank[name][1]])
