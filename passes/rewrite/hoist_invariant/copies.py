"""Values that hold one thing several times over, and how such a form moves through views.

`Copies(base, dim, steps, place)` says of a node: its value is that of `base`, `steps` times along dim `dim`. The copies
stand `alone` in a dim of their own, which the base does not have, or share the dim with what the base has there, as its
`outer` or its `inner` part: [T, N, ...], [T*N, ...] and [N*T, ...] for an image [N, ...] repeated over T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Origin, TimeRole, Value
from snnpart.passes.analyze import kinds

Place = Literal["alone", "outer", "inner"]
MADE_BY = "hoist-invariant"
_CHANGES = (0, 1, 3)
"""Changes of the batch at which sizes are compared: dims that agree at all of them grow alike."""


@dataclass(frozen=True, slots=True)
class Copies:
    """See the module. `worked`: an operation that computes something lies between the repetition and here."""

    base: fx.Node
    dim: int
    steps: int
    place: Place
    worked: bool = False

    def value_of_base(self, whole: Value) -> Value | None:
        """What the base is like when the whole is `whole`; None when the copies cannot be there."""
        shape, slopes = list(whole.shape), list(whole.slopes)
        if self.place == "alone":
            if shape[self.dim] != self.steps or slopes[self.dim]:
                return None
            del shape[self.dim], slopes[self.dim]
        elif shape[self.dim] % self.steps or slopes[self.dim] % self.steps:
            return None
        else:
            shape[self.dim] //= self.steps
            slopes[self.dim] //= self.steps
        return Value(tuple(shape), whole.dtype, tuple(slopes), (), whole.requires_grad)

    def apart(self, whole: Value) -> Value:
        """The whole with the copies in a dim of their own, which is returned by `at`."""
        if self.place == "alone":
            return whole
        inner = self.value_of_base(whole)
        assert inner is not None  # holds for every value that is known to be copies
        shape, slopes = list(inner.shape), list(inner.slopes)
        shape.insert(self.at, self.steps)
        slopes.insert(self.at, 0)
        return Value(tuple(shape), whole.dtype, tuple(slopes), (), whole.requires_grad)

    @property
    def at(self) -> int:
        """The dim of the copies in `apart`."""
        return self.dim + (self.place == "inner")

    def viewed(self, before: Value, after: Value) -> Copies | None:
        """Where the copies are after a view that turns `before` into `after`; None when they are scattered.

        The base of the result is still this one's.
        """
        spread = self.apart(before)
        outside = _products(spread, self.at)
        inside = [size * self.steps for size in outside]
        for dim in range(len(after.shape)):
            starts, ends = _products(after, dim), _products(after, dim + 1)
            if starts != outside and ends != inside:
                continue
            alone = starts == outside and ends == inside
            place: Place = "alone" if alone else "outer" if starts == outside else "inner"
            found = replace(self, dim=dim, place=place)
            if found.value_of_base(after) is not None:
                return found
        return None


def _products(value: Value, dims: int) -> list[int]:
    """How many elements the first `dims` dims have, at several batches."""
    return [math.prod(value.shape_at(change)[:dims]) for change in _CHANGES]


@dataclass(frozen=True)
class Emit:
    """Makes nodes before `node`, in its place in the program."""

    node: fx.Node

    def call(
        self, op: str, target: Any, args: tuple[Any, ...], value: Value, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.create_node(op, target, args, kwargs or {})
        known = facts.origin(self.node)
        facts.put(made, *facts.every(self.node).values())
        facts.put(made, value, Origin(known.module, known.file, known.line, MADE_BY))
        role = facts.get(self.node, TimeRole)
        if role is not None:
            facts.put(made, TimeRole(step=role.step, varies=False))
        return made

    def once(
        self, like: Copies, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, target: Any = None
    ) -> Copies | None:
        """The node's operation computed once; its value is `like` of the result."""
        whole = facts.need(self.node, Value)
        value = like.value_of_base(whole)
        if value is None:
            return None
        kwargs = dict(self.node.kwargs) if kwargs is None else kwargs
        made = self.call(self.node.op, target or self.node.target, args, value, kwargs)
        return replace(like, base=made, worked=True)

    def reshaped(self, like: Copies) -> Copies | None:
        """The view that the node is, of `like.base`."""
        value = like.value_of_base(facts.need(self.node, Value))
        sizes = None if value is None else _sizes(value)
        if value is None or sizes is None:
            return None
        old = facts.need(like.base, Value)
        if (old.shape, old.slopes) == (value.shape, value.slopes):
            return like
        return replace(like, base=self.call("call_function", torch.reshape, (like.base, sizes), value))

    def with_batch(self, copies: Copies) -> Copies:
        """Copies that stand alone, as the outer part of a dim of size 1 that the base gets."""
        if copies.place != "alone":
            return copies
        return replace(copies, base=self.unsqueezed(copies.base, copies.dim), place="outer")

    def unsqueezed(self, base: fx.Node, dim: int) -> fx.Node:
        """The base with a dim of size 1 more."""
        old = facts.need(base, Value)
        value = _inserted(old, dim, 1)
        return self.call("call_function", torch.unsqueeze, (base, dim), value)

    def squeezed(self, node: fx.Node, dim: int) -> fx.Node:
        """The node without its dim of size 1."""
        old = facts.need(node, Value)
        if kinds.name_of(node) == "unsqueeze" and kinds.argument(node, 1, "dim") in (dim, dim - len(old.shape)):
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            return source
        value = Value(_without(old.shape, dim), old.dtype, _without(old.slopes, dim), (), old.requires_grad)
        return self.call("call_function", torch.squeeze, (node, dim), value)

    def restored(self, copies: Copies) -> fx.Node:
        """The whole value again, made of the base; copies that stand alone are a view of it."""
        at, rank = copies.at, len(facts.need(copies.base, Value).shape) + 1
        thin = self.unsqueezed(copies.base, at)
        value = _inserted(facts.need(copies.base, Value), at, copies.steps)
        sizes = tuple(copies.steps if dim == at else -1 for dim in range(rank))
        spread = self.call("call_method", "expand", (thin, sizes), value)
        if copies.place == "alone":
            return spread
        whole = replace(facts.need(self.node, Value), stride=())
        return self.call("call_function", torch.flatten, (spread, copies.dim, copies.dim + 1), whole)


def _inserted(old: Value, dim: int, size: int) -> Value:
    shape, slopes = (*old.shape[:dim], size, *old.shape[dim:]), (*old.slopes[:dim], 0, *old.slopes[dim:])
    return Value(shape, old.dtype, slopes, (), old.requires_grad)


def _without(items: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*items[:dim], *items[dim + 1 :])


def _sizes(value: Value) -> tuple[int, ...] | None:
    """Sizes for a reshape: -1 for the dim that grows; None when several do."""
    if len(value.batch_dims) > 1:
        return None
    return tuple(-1 if slope else size for size, slope in zip(value.shape, value.slopes, strict=True))
