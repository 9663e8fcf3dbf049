"""Rows of operations that move elements: views, permutations, concatenation, indexing, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Pieces, Sharded, Spread, Value
from snnpart.passes.decide.rules import (
    Ask,
    Deal,
    Declined,
    Misdealt,
    Row,
    argument,
    divided,
    even,
    extent,
    first_lane,
    is_tensor,
    of_section,
    results,
    row,
    scaled,
    shape,
)

MOST_RUNS = 16
"""Intervals that a rank may hold of a dim: more of them are copied one by one wherever the value is sent."""


def reshape(node: fx.Node, ask: Ask) -> Row:
    """reshape, flatten, unflatten, view: the channels must be the outermost part of what is merged or split, or lie
    behind a few others (query, key, value)."""
    x = argument(node, 0, "input")
    lane, before, after = ask.need(x), facts.need(x, Value), next(results(node)).shape
    if 0 in before.shape:
        raise Declined("it has no elements")
    for source, target in _groups(before.shape, after):
        if lane.dim in source:
            found = _merged_behind(lane, before, after, source, target)
            return row(node, found or _regroup(lane, before.shape, after, source, target), {x: lane})
    raise Declined("the sharded dim does not survive the reshape")


def _merged_behind(lane: Sharded, before: Value, after: Sequence[int], source: range, target: range) -> Sharded | None:
    """The lane of a dim merged into those outside it: as many runs of it as these have places, which may be split again
    (query, key, value and heads into as many heads). None where it is the outermost."""
    outside = [dim for dim in source if dim < lane.dim]
    outer = prod(before.shape[dim] for dim in outside)
    if outer == 1:
        return None
    if any(before.slopes[dim] for dim in outside):
        raise Declined("the sharded dim is merged into a dim outside it that grows with the batch")
    inner = prod(before.shape[dim] for dim in source if dim > lane.dim)
    size = before.shape[lane.dim] * inner
    runs = Deal.repeated(scaled(lane.pieces, inner), outer, size)
    if any(len(held) > MOST_RUNS for held in runs):
        raise Declined(f"the sharded dim is merged into a dim outside it: a rank would hold more than {MOST_RUNS} runs")
    return _regroup(Sharded(0, runs), (outer * size,), after, range(1), target)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """The runs of dims of both shapes that hold the same elements, as short as possible."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        start, other, left, right = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append((range(start, i), range(other, j)))
    return groups


def _regroup(lane: Sharded, before: Sequence[int], after: Sequence[int], source: range, target: range) -> Sharded:
    inner = 1
    for dim in source:
        inner *= before[dim] if dim > lane.dim else 1
    dim = next(dim for dim in target if after[dim] != 1)
    rest = prod(after[later] for later in target if later > dim)
    pieces = scaled(lane.pieces, inner)
    inward = [later for later in target if later > dim and after[later] != 1]
    if inward and (own := _one_section(pieces, after[dim])) is not None:
        dim, rest, pieces = inward[0], rest // after[inward[0]], own
    return Sharded(dim, divided(pieces, rest, "blocks"))


def _one_section(pieces: tuple[Pieces, ...], sections: int) -> tuple[Pieces, ...] | None:
    """What the ranks hold of one of several sections (query, key, value), where it is the same in each."""
    try:
        return of_section(pieces, sections)
    except Declined:
        return None


def permute(node: fx.Node, ask: Ask) -> Row:
    x = argument(node, 0, "input")
    lane, rank = ask.need(x), len(shape(x))
    order = [dim % rank for dim in argument(node, 1, "dims")]
    return row(node, Sharded(order.index(lane.dim), lane.pieces), {x: lane})


def transpose(node: fx.Node, ask: Ask) -> Row:
    x = argument(node, 0, "input")
    lane, rank = ask.need(x), len(shape(x))
    first, second = argument(node, 1, "dim0") % rank, argument(node, 2, "dim1") % rank
    dim = {first: second, second: first}.get(lane.dim, lane.dim)
    return row(node, Sharded(dim, lane.pieces), {x: lane})


def movedim(node: fx.Node, ask: Ask) -> Row:
    x = argument(node, 0, "input")
    lane, rank = ask.need(x), len(shape(x))
    sources, targets = (
        [dim % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))]
        for dims in (argument(node, 1, "source"), argument(node, 2, "destination"))
    )
    rest = iter(dim for dim in range(rank) if dim not in sources)
    order = [sources[targets.index(dim)] if dim in targets else next(rest) for dim in range(rank)]
    return row(node, Sharded(order.index(lane.dim), lane.pieces), {x: lane})


def unsqueeze(node: fx.Node, ask: Ask) -> Row:
    x = argument(node, 0, "input")
    lane = ask.need(x)
    at = argument(node, 1, "dim") % (len(shape(x)) + 1)
    return row(node, Sharded(lane.dim + (at <= lane.dim), lane.pieces), {x: lane})


def expand(node: fx.Node, ask: Ask) -> Row:
    """expand and repeat: dims may be added in front; the sharded one is not repeated."""
    x = argument(node, 0, "input")
    lane, out = ask.need(x), next(results(node)).shape
    dim = lane.dim + len(out) - len(shape(x))
    return row(node, Sharded(dim, lane.pieces), {x: lane})


def cat(node: fx.Node, ask: Ask) -> Row:
    """Concatenation: along another dim the operands lie alike; along the channels each keeps its own lane."""
    tensors, given = list(argument(node, 0, "tensors")), argument(node, 1, "dim", 0)
    source = first_lane(node, ask)
    lane, rank = ask.need(source), len(shape(source))
    dim = given % rank
    if len(set(tensors)) != len(tensors):
        raise Declined("it concatenates a value with itself")
    if dim != lane.dim:
        return row(node, lane, dict.fromkeys(tensors, lane))
    needs: dict[fx.Node, Spread] = {}
    offset, joined = 0, [[] for _ in range(ask.tp)]  # type: tuple[int, list[list[tuple[int, int]]]]
    for tensor in tensors:
        size = shape(tensor)[dim]
        own = ask.lane(tensor)
        spread = own if own is not None and own.dim == dim else Sharded(dim, even(size, ask.tp))
        needs[tensor] = spread
        for whole, pieces in zip(joined, spread.pieces):
            whole.extend((start + offset, stop + offset) for start, stop in pieces)
        offset += size
    return row(node, Sharded(dim, tuple(_merged(pieces) for pieces in joined)), needs)


def _merged(pieces: Sequence[tuple[int, int]]) -> Pieces:
    """Pieces with neighbours that touch joined."""
    found: list[tuple[int, int]] = []
    for start, stop in pieces:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def stack(node: fx.Node, ask: Ask) -> Row:
    tensors = list(argument(node, 0, "tensors"))
    source = first_lane(node, ask)
    lane = ask.need(source)
    dim = argument(node, 1, "dim", 0) % (len(shape(source)) + 1)
    return row(node, Sharded(lane.dim + (dim <= lane.dim), lane.pieces), dict.fromkeys(tensors, lane))


def getitem(node: fx.Node, ask: Ask) -> Row:
    """An element of a tuple lies as the tuple does; a tensor is indexed in other dims than the sharded one."""
    source, index = node.args
    lane = ask.need(source)
    if not is_tensor(source):
        return row(node, lane, {source: lane})  # type: ignore[dict-item]
    try:
        out = _result_dim(index, len(shape(source)), lane.dim)
    except Declined as reason:
        raise Misdealt(str(reason), extent(lane.pieces), sections=extent(lane.pieces)) from None
    return row(node, Sharded(out, lane.pieces), {source: lane})  # type: ignore[dict-item]


def _result_dim(index: Any, rank: int, dim: int) -> int:
    """Where dim `dim` of a tensor of `rank` dims lies after indexing with ints, slices, None and Ellipsis."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (rank - used)
    source = result = 0
    for item in items:
        if item is None:
            result += 1
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            if source == dim:
                if item != slice(None):
                    raise Declined("it indexes the sharded dim")
                return result
            result += isinstance(item, slice)
            source += 1
        else:
            raise Declined("it is indexed with a tensor")
    raise Declined("it indexes the sharded dim")


def index_assign(node: fx.Node, ask: Ask) -> Row:
    """`x[index] = value`: the index leaves the sharded dim whole, and the value lies as the part it replaces."""
    x, index, value = node.args
    rank = len(shape(x))
    lane = ask.lane(x) or _lane_of_target(index, rank, ask.need(value), shape(value), shape(x))
    _leaves_whole(index, lane.dim)
    needs: dict[fx.Node, Spread] = {x: lane}  # type: ignore[dict-item]
    if is_tensor(value):
        inside = _result_dim(index, rank, lane.dim)
        kept = sum(1 for d in range(rank) if d > lane.dim and _survives(index, rank, d))
        own = len(shape(value)) - 1 - kept
        if own >= 0 and shape(value)[own] == shape(x)[lane.dim] and inside >= 0:
            needs[value] = Sharded(own, lane.pieces)  # type: ignore[index]
    return row(node, lane, needs)


def _leaves_whole(index: Any, sharded: int) -> None:
    """Declined when the index picks inside the sharded dim: by numbers, by a slice, or by a mask, which spans dims."""
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        if is_tensor(item) and (len(shape(item)) != 1 or facts.need(item, Value).dtype in (torch.bool, torch.uint8)):
            raise Declined("it is written through a mask")
    if sharded < len(items) and items[sharded] not in (slice(None), Ellipsis, None):
        raise Declined("it writes into parts of the sharded dim")


def _survives(index: Any, rank: int, dim: int) -> bool:
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items or None in items:
        raise Declined("it is written through an index with None or Ellipsis")
    return dim >= len(items) or isinstance(items[dim], slice)


def _lane_of_target(index: Any, rank: int, lane: Sharded, size: Sequence[int], whole: Sequence[int]) -> Sharded:
    """The dim of the target in which the value's lane lies."""
    behind = len(size) - 1 - lane.dim
    for dim in reversed(range(rank)):
        if _survives(index, rank, dim):
            if behind == 0 and whole[dim] == size[lane.dim]:
                return Sharded(dim, lane.pieces)
            behind -= 1
    raise Declined("the value written is sharded in a dim that the target does not have")


def select(node: fx.Node, ask: Ask) -> Row:
    """select, and unbind whose results lie like select's: the dim disappears."""
    x = argument(node, 0, "input")
    lane = ask.need(x)
    dim = argument(node, 1, "dim", 0) % len(shape(x))
    if dim == lane.dim:
        raise Misdealt("it takes the sharded dim apart", extent(lane.pieces), sections=extent(lane.pieces))
    return row(node, Sharded(lane.dim - (dim < lane.dim), lane.pieces), {x: lane})


def sections(node: fx.Node, ask: Ask) -> Row:
    """chunk and split: along the sharded dim into equal parts of which each rank holds the same channels."""
    x = node.args[0]
    lane, size = ask.need(x), shape(x)
    if argument(node, 2, "dim", 0) % len(size) != lane.dim:
        return row(node, lane, {x: lane})  # type: ignore[dict-item]
    parts = {value.shape[lane.dim] for value in results(node)}
    if len(parts) != 1:
        raise Declined("it splits the sharded dim into unequal parts")
    return row(node, Sharded(lane.dim, of_section(lane.pieces, size[lane.dim] // parts.pop())), {x: lane})  # type: ignore[dict-item]


def along(node: fx.Node, ask: Ask, position: int, name: str = "dim", default: Any = None) -> Row:
    """Operations that work along one dim and keep it: narrow, softmax, cumsum, flip, index_select."""
    x = node.args[0]
    lane = ask.need(x)
    dims = argument(node, position, name, default)
    rank = len(shape(x))
    if dims is None or lane.dim in [dim % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))]:
        raise Declined("it works along the sharded dim")
    return row(node, lane, {x: lane})  # type: ignore[dict-item]


def last_two(node: fx.Node, ask: Ask) -> Row:
    """What works on the last two dims: triangles."""
    x = argument(node, 0, "input")
    lane = ask.need(x)
    if lane.dim >= len(shape(x)) - 2:
        raise Declined("it works along the sharded dim")
    return row(node, lane, {x: lane})


def gated(node: fx.Node, ask: Ask) -> Row:
    """glu: one half of a dim is gated by the other; the ranks hold the same channels of both."""
    x = argument(node, 0, "input")
    lane = ask.need(x)
    if argument(node, 1, "dim", -1) % len(shape(x)) != lane.dim:
        return row(node, lane, {x: lane})
    return row(node, Sharded(lane.dim, of_section(lane.pieces, 2)), {x: lane})


def unfold(node: fx.Node, ask: Ask) -> Row:
    """Patches of images: a channel becomes as many as a patch has pixels."""
    x = argument(node, 0, "input")
    lane, out = ask.need(x), next(results(node)).shape
    if lane.dim != len(shape(x)) - 3:
        raise Declined("it moves pixels of the sharded dim")
    factor = out[lane.dim] // shape(x)[lane.dim]
    return row(node, Sharded(lane.dim, scaled(lane.pieces, factor)), {x: lane})


def reduce(node: fx.Node, ask: Ask, position: int = 1, kept: int = 2) -> Row:
    """Sums, means and the like over other dims than the sharded one; `position` and `kept` are those of dim and
    keepdim among the arguments."""
    x = argument(node, 0, "input")
    lane, rank = ask.need(x), len(shape(x))
    dims = argument(node, position, "dim")
    keep = bool(argument(node, kept, "keepdim", False))
    if dims is None or dims == () or isinstance(dims, fx.Node):
        raise Declined("it reduces over all dims")
    gone = {dim % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    if lane.dim in gone:
        raise Declined("it reduces over the sharded dim")
    before = 0 if keep else sum(dim < lane.dim for dim in gone)
    return row(node, Sharded(lane.dim - before, lane.pieces), {x: lane})


def squeeze(node: fx.Node, ask: Ask) -> Row:
    """squeeze of dims of size 1, which the sharded one is not."""
    x = argument(node, 0, "input")
    lane, extents = ask.need(x), shape(x)
    dims = argument(node, 1, "dim")
    asked = (
        range(len(extents))
        if dims is None
        else [d % len(extents) for d in (dims if isinstance(dims, tuple) else (dims,))]
    )
    gone = [dim for dim in asked if extents[dim] == 1 and dim < lane.dim]
    return row(node, Sharded(lane.dim - len(gone), lane.pieces), {x: lane})


def matmul(node: fx.Node, ask: Ask) -> Row:
    """A batch of products (attention heads): both operands lie alike in one batch dim."""
    left, right = node.args[0], node.args[1]
    lane = ask.need(first_lane(node, ask))
    sizes = shape(left), shape(right)
    if len(sizes[0]) != len(sizes[1]) or lane.dim >= len(sizes[0]) - 2 or sizes[0][lane.dim] != sizes[1][lane.dim]:
        raise Declined("a product of two activations is sharded over batch dims (heads) only")
    return row(node, lane, {left: lane, right: lane})  # type: ignore[dict-item]


def bundle(node: fx.Node, ask: Ask) -> Row:
    """A tuple that wraps values which all lie alike."""
    lanes = {ask.lane(n) for n in node.all_input_nodes}
    if len(lanes) != 1 or None in lanes:
        raise Declined("its values do not all lie alike")
    lane = ask.need(node.all_input_nodes[0])
    return row(node, lane, dict.fromkeys(node.all_input_nodes, lane))


def value_bytes(node: fx.Node) -> int:
    """Bytes of all tensors a node makes."""
    return sum(value.bytes for value in results(node))


def carries_gradient(node: fx.Node) -> bool:
    value = facts.get(node, Value)
    return value.requires_grad if value is not None else any(item.requires_grad for item in results(node))
