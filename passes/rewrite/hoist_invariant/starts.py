"""Where repetition starts: the operations that put one value several times into a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.passes.analyze import kinds
from snnpart.passes.rewrite.hoist_invariant.copies import Copies, Emit


def start(node: fx.Node) -> Copies | None:
    """The node's value as copies of one of its inputs, if the node is what repeats it."""
    rule = _RULES.get(kinds.name_of(node)) if node.op in ("call_function", "call_method") else None
    if rule is None or facts.get(node, Value) is None:
        return None
    return rule(node)


def _expand(node: fx.Node) -> Copies | None:
    """`expand` of one dim of size 1 or of one new dim in front; `repeat` where only that dim is repeated."""
    source = node.args[0]
    before, after = kinds.value_of(source), facts.need(node, Value)
    if before is None or not isinstance(source, fx.Node):
        return None
    new = len(after.shape) - len(before.shape)
    old = [((1, 0),) * new, tuple(zip(before.shape, before.slopes, strict=True))]
    sizes = (*old[0], *old[1])
    grown = [d for d, size in enumerate(zip(after.shape, after.slopes, strict=True)) if size != sizes[d]]
    if len(grown) != 1 or new > (grown[0] == 0) or not sizes[grown[0]][0]:
        return None
    (dim,) = grown
    (size, slope), steps = sizes[dim], after.shape[dim]
    if size == 1 and not slope:
        if after.slopes[dim]:
            return None
        return Copies(source if new else Emit(node).squeezed(source, dim), dim, steps, "alone")
    return _repeat_of_many(node, source, dim, steps // size, slope)


def _repeat_of_many(node: fx.Node, source: fx.Node, dim: int, steps: int, slope: int) -> Copies | None:
    """A dim that already holds several things, all of them `steps` times one after the other."""
    after = facts.need(node, Value)
    before = facts.need(source, Value)
    exact = after.shape[dim] == steps * before.shape[dim] and after.slopes[dim] == steps * slope
    return Copies(source, dim, steps, "outer") if exact and kinds.name_of(node) in ("repeat", "tile") else None


def _interleave(node: fx.Node) -> Copies | None:
    """`repeat_interleave` by a number along a dim: [N*T, ...] with time inside."""
    source, steps, dim = node.args[0], kinds.argument(node, 1, "repeats"), kinds.argument(node, 2, "dim")
    before = kinds.value_of(source)
    if before is None or not isinstance(source, fx.Node) or not isinstance(steps, int) or not isinstance(dim, int):
        return None
    return Copies(source, dim % len(before.shape), steps, "inner") if steps > 1 else None


def _stack(node: fx.Node) -> Copies | None:
    """`stack` of one value several times."""
    found = _same(node)
    if found is None:
        return None
    source, count = found
    return Copies(source, kinds.argument(node, 1, "dim", 0) % len(facts.need(node, Value).shape), count, "alone")


def _cat(node: fx.Node) -> Copies | None:
    """`cat` of one value several times."""
    found = _same(node)
    if found is None:
        return None
    source, count = found
    return Copies(source, kinds.argument(node, 1, "dim", 0) % len(facts.need(node, Value).shape), count, "outer")


def _same(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The node that all items of a list are, and how many they are."""
    items = node.args[0]
    if not isinstance(items, (tuple, list)) or len(items) < 2 or not isinstance(items[0], fx.Node):
        return None
    return (items[0], len(items)) if all(item is items[0] for item in items) else None


_RULES: Mapping[str, Callable[[fx.Node], Copies | None]] = {
    "expand": _expand, "repeat": _expand, "tile": _expand, "broadcast_to": _expand,
    "repeat_interleave": _interleave, "stack": _stack, "cat": _cat,
}  # fmt: skip
