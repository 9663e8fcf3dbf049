"""Chunks with global offsets: whatever the cut, they tile the tensor once; whatever is missing or twice is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snnpart.errors import CheckpointError
from snnpart.runtime.checkpoint.chunks import Box, Chunk, check_tiles, chunks_of

PIECES = {
    "3 + 4 channels": (((0, 3),), ((3, 7),)),
    "group borders": (((0, 2), (4, 5)), ((2, 4), (5, 7))),
    "fused qkv": (((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 7))),
    "a rank with nothing": (((0, 7),), ()),
}


def held(whole: torch.Tensor, dim: int, pieces: tuple[tuple[int, int], ...], dp: int) -> list[tuple[Chunk, ...]]:
    """What dp ranks of FSDP2 hold of a tp rank's part, as chunks."""
    parts = [whole.narrow(dim, start, end - start) for start, end in pieces]
    local = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    size = -(-local.shape[0] // dp)
    rows = [(min(r * size, local.shape[0]), min((r + 1) * size, local.shape[0])) for r in range(dp)]
    return [chunks_of(local[a:b], dim, pieces, (a, b)) for a, b in rows]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("cut", PIECES, ids=str)
def test_chunks_tile_and_hold_the_right_numbers(cut: str, dim: int, dp: int) -> None:
    whole = torch.arange(7.0 * 7 * 2).reshape(7, 7, 2)
    every = [chunk for pieces in PIECES[cut] for rank in held(whole, dim, pieces, dp) for chunk in rank]
    check_tiles("w", whole.shape, [chunk.box for chunk in every])
    for chunk in every:
        region = whole[tuple(slice(o, o + s) for o, s in zip(*chunk.box, strict=True))]
        assert torch.equal(region, chunk.data)


def test_whole_tensors_and_single_numbers() -> None:
    assert [chunk.box for chunk in chunks_of(torch.rand(3, 2), None, ())] == [((0, 0), (3, 2))]
    assert [chunk.box for chunk in chunks_of(torch.tensor(1.0), None, ())] == [((), ())]
    assert [chunk.box for chunk in chunks_of(torch.rand(2, 2), None, (), (4, 6))] == [((4, 0), (2, 2))]
    assert chunks_of(torch.rand(0, 2), None, (), (6, 6)) == ()


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0,), (3,))], "has 4 numbers, the ranks hold 3 of it"),
        ([((0,), (3,)), ((2,), (1,))], "the chunks at (0,) and (2,) overlap"),
        ([((0,), (4,)), ((0,), (4,))], "the ranks hold 8 of it"),
    ],
)
def test_gaps_and_overlaps_are_refused(boxes: list[Box], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_tiles("layer.weight", (4,), boxes)
    assert message in str(caught.value) and "'layer.weight'" in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_an_overlap_in_two_dims_is_found(data: st.DataObject) -> None:
    """A grid of boxes tiles; with one box moved onto another of its size it does not."""
    rows, columns = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
    grid: list[Box] = [((2 * i, 3 * j), (2, 3)) for i in range(rows) for j in range(columns)]
    check_tiles("w", (2 * rows, 3 * columns), grid)
    one, other = data.draw(st.permutations(range(len(grid))))[:2]
    grid[one] = grid[other]
    with pytest.raises(CheckpointError, match="overlap"):
        check_tiles("w", (2 * rows, 3 * columns), grid)
