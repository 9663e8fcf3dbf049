"""Which dim of an input is which dim of the result, operation by operation.

`links(node, source)` gives pairs (dims of the input, dims of the result) that hold the same elements in the same
order: ((2,), (1,)) for a dim that moved, ((0, 1), (0,)) for two dims merged into one, ((0,), (0, 1)) for one split in
two. Dims that are reduced, mixed or indexed away are in no pair. Known for the kinds of `kinds`; nothing is claimed
for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from snnpart.facts import Value
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import argument, first_value

Dims = tuple[int, ...]
Link = tuple[Dims, Dims]


def links(node: fx.Node, source: fx.Node) -> list[Link]:
    """The pairs for one input of the node."""
    before, after = first_value(source), first_value(node)
    rule = _RULES.get(kinds.kind_of(node))
    if before is None or after is None or rule is None:
        return []
    return rule(node, source, before, after)


def _aligned(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    """Broadcasting: dims are aligned from the right; a dim of size 1 that grows is none of the input's."""
    shift = len(after.shape) - len(before.shape)
    return [
        ((d,), (d + shift,)) for d, size in enumerate(before.shape) if d + shift >= 0 and size == after.shape[d + shift]
    ]


def _reshaped(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    """Runs of dims with equal products, from the left."""
    found: list[Link] = []
    i = j = 0
    while i < len(before.shape) and j < len(after.shape):
        group_in, group_out = [i], [j]
        left, right = before.shape[i], after.shape[j]
        while left != right:
            if left < right and group_in[-1] + 1 < len(before.shape):
                group_in.append(group_in[-1] + 1)
                left *= before.shape[group_in[-1]]
            elif right < left and group_out[-1] + 1 < len(after.shape):
                group_out.append(group_out[-1] + 1)
                right *= after.shape[group_out[-1]]
            else:
                return found
        found.append((tuple(group_in), tuple(group_out)))
        i, j = group_in[-1] + 1, group_out[-1] + 1
    return found


def _squeezed(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    """Dims other than the one that is dropped or added keep their order."""
    name = kinds.name_of(node)
    dim = argument(node, 1, "dim")
    if name == "unsqueeze" and isinstance(dim, int):
        new = dim % len(after.shape)
        return [((d,), (d + (d >= new),)) for d in range(len(before.shape))]
    gone = range(len(before.shape)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    dropped = {d % len(before.shape) for d in gone if before.shape[d] == 1} if before.shape else set()
    kept = [d for d in range(len(before.shape)) if d not in dropped]
    return [((d,), (at,)) for at, d in enumerate(kept)]


def _viewed(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    rule = _squeezed if kinds.name_of(node) in ("squeeze", "unsqueeze") else _reshaped
    return rule(node, source, before, after)


def _permuted(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    order = list(range(len(before.shape)))
    name, first, second = kinds.name_of(node), argument(node, 1, "dims"), argument(node, 2, "destination")
    if name == "permute":
        order = [d % len(order) for d in first]
    elif name == "movedim":
        order = _moved(order, first, second)
    else:
        a, b = (0, len(order) - 1) if name == "t" else (argument(node, 1, "dim0"), argument(node, 2, "dim1"))
        order[a], order[b] = order[b], order[a]
    return [((d,), (at,)) for at, d in enumerate(order)]


def _moved(order: list[int], source: Any, destination: Any) -> list[int]:
    pairs = zip(*((x,) if isinstance(x, int) else x for x in (source, destination)), strict=True)
    places = {to % len(order): at % len(order) for at, to in pairs}
    rest = iter(d for d in order if d not in places.values())
    return [places[at] if at in places else next(rest) for at in order]


def _indexed(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    name = kinds.name_of(node)
    if name == "getitem" and kinds.value_of(source) is None:
        return [((d,), (d,)) for d in range(len(before.shape))] if len(before.shape) == len(after.shape) else []
    if name in ("select", "unbind"):
        gone = argument(node, 1, "dim", 0) % len(before.shape)
        return [((d,), (d - (d > gone),)) for d in range(len(before.shape)) if d != gone]
    if name == "getitem":
        return _getitem(node.args[1], before)
    return _same_sizes(node, source, before, after)


def _getitem(index: Any, before: Value) -> list[Link]:
    """Basic indexing; nothing is claimed for tensors and lists as indices."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(isinstance(item, (int, slice)) and not isinstance(item, bool) for item in items)
    if any(not (item is None or item is Ellipsis or isinstance(item, (int, slice))) for item in items):
        return []
    if Ellipsis not in items:
        items.append(Ellipsis)
    found: list[Link] = []
    at = to = 0
    for item in items:
        if item is Ellipsis:
            width = len(before.shape) - taken
            found += [((at + k,), (to + k,)) for k in range(width)]
            at, to = at + width, to + width
        elif item is None:
            to += 1
        elif isinstance(item, slice):
            found += [((at,), (to,))] if item == slice(None) else []
            at, to = at + 1, to + 1
        else:
            at += 1
    return found


def _joined(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    new = argument(node, 1, "dim", 0)
    if kinds.name_of(node) == "cat":
        new %= len(after.shape)
        return [((d,), (d,)) for d in range(len(before.shape)) if d != new]
    new %= len(after.shape)
    return [((d,), (d + (d >= new),)) for d in range(len(before.shape))]


def _reduced(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    dim = argument(node, 1, "dim")
    if not isinstance(dim, (int, tuple, list)) or isinstance(dim, bool):
        return []
    gone = {d % len(before.shape) for d in ((dim,) if isinstance(dim, int) else dim)}
    keep = len(after.shape) == len(before.shape)
    kept = [d for d in range(len(before.shape)) if d not in gone]
    return [((d,), (d if keep else at,)) for at, d in enumerate(kept)]


def _same_sizes(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    """Same number of dims; those of equal size and growth correspond."""
    if len(before.shape) != len(after.shape):
        return _aligned(node, source, before, after) if kinds.name_of(node) in ("expand", "repeat") else []
    rows = zip(before.shape, after.shape, before.slopes, after.slopes, strict=True)
    return [((d,), (d,)) for d, (a, b, grow_a, grow_b) in enumerate(rows) if a == b and grow_a == grow_b]


def _first_only(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    """Only the first input has the result's dims (the others are weights)."""
    return _same_sizes(node, source, before, after) if node.args and node.args[0] is source else []


def _convolved(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    channel = len(before.shape) - len(node.args[3]) - 1 if len(node.args) > 3 and isinstance(node.args[3], tuple) else 1
    return [link for link in _first_only(node, source, before, after) if link[0] != (channel,)]


def _linear(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    return [((d,), (d,)) for d in range(len(before.shape) - 1)] if node.args[0] is source else []


def _multiplied(node: fx.Node, source: fx.Node, before: Value, after: Value) -> list[Link]:
    """Leading dims broadcast; the first operand's rows and the second's columns remain."""
    if min(len(before.shape), len(after.shape)) < 2:
        return []
    last = len(before.shape) - 1
    inner = {last} if node.args[0] is source else {last - 1}
    return [link for link in _aligned(node, source, before, after) if link[0][0] not in inner]


Rule = Callable[[fx.Node, fx.Node, Value, Value], list[Link]]
_RULES: dict[str, Rule] = {
    "elementwise": _aligned,
    "view": _viewed,
    "permute": _permuted,
    "index": _indexed,
    "join": _joined,
    "reduction": _reduced,
    "conv": _convolved,
    "linear": _linear,
    "matmul": _multiplied,
    "norm": _first_only,
    "pool": _first_only,
    "surrogate": _aligned,
    "leaf": _first_only,
    "same": _same_sizes,
}
