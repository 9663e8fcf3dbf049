"""Operations that compute the same thing for every copy, kind by kind: how each is computed once.

A rule gets a node of which at least one input is copies. It emits the operation on the bases and says in which form the
node's value is copies of that result; None when the copies matter to the operation, or when it is not known. A rule
that gives up may leave nodes without users behind, which the pass sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from snnpart import effects, facts, ops
from snnpart.facts import Value
from snnpart.passes.analyze import dims, kinds
from snnpart.passes.rewrite.hoist_invariant.copies import Copies, Emit

Known = Mapping[fx.Node, Copies]
_PER_CHANNEL = frozenset({"prelu"})
"""Operations of kind element-wise that tell dim 1 from the others."""


def follow(node: fx.Node, known: Known) -> Copies | None:
    """The node's value as copies of something that is computed once; None when it cannot be."""
    rule = _RULES.get(kinds.kind_of(node)) if node.op in ("call_function", "call_method") else None
    if rule is None or facts.get(node, Value) is None or "memory_format" in node.kwargs:
        return None
    return rule(node, known, Emit(node))


def _elementwise(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """Operands that are copies have them in the same place; the others are broadcast over it."""
    if effects.is_random(node) or effects.is_in_place(node) or kinds.name_of(node) in _PER_CHANNEL:
        return None
    operands = kinds.tensor_inputs(node)
    mine = [(_from_right(operand, known[operand].dim), known[operand]) for operand in operands if operand in known]
    if not mine or len({(right, copies.steps, copies.place) for right, copies in mine}) > 1:
        return None
    right, like = mine[0]
    bases: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        base = known[operand].base if operand in known else _broadcast(operand, right, like, emit)
        if base is None:
            return None
        bases[operand] = base
    dim = len(facts.need(node, Value).shape) - right
    return emit.once(replace(like, dim=dim), *_with(node, bases))


def _from_right(node: fx.Node, dim: int) -> int:
    return len(facts.need(node, Value).shape) - dim


def _broadcast(operand: fx.Node, right: int, like: Copies, emit: Emit) -> fx.Node | None:
    """An operand that is the same for all copies, without the dim in which they would be."""
    value = facts.get(operand, Value)
    if value is None:
        return None
    dim = len(value.shape) - right
    if dim < 0:
        return operand
    if value.shape[dim] != 1 or value.slopes[dim]:
        return None
    return emit.squeezed(operand, dim) if like.place == "alone" else operand


def _with(node: fx.Node, bases: Mapping[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with bases in place of copies."""
    args = fx.node.map_arg(node.args, lambda item: bases.get(item, item))
    return args, fx.node.map_arg(node.kwargs, lambda item: bases.get(item, item))  # type: ignore[return-value]


def _view(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    copies = _only_first(node, known)
    if copies is None:
        return None
    moved = copies.viewed(facts.need(node.args[0], Value), facts.need(node, Value))  # type: ignore[arg-type]
    return None if moved is None else emit.reshaped(moved)


def _only_first(node: fx.Node, known: Known) -> Copies | None:
    """The first argument's copies, when no other argument is copies."""
    first = node.args[0] if node.args else None
    alone = isinstance(first, fx.Node) and [item for item in node.all_input_nodes if item in known] == [first]
    return known[first] if alone else None  # type: ignore[index]


def _permute(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    copies = _only_first(node, known)
    if copies is None:
        return None
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    order = [link[0][0] for link in sorted(dims.links(node, source), key=lambda link: link[1])]
    if len(order) != len(facts.need(source, Value).shape):
        return None
    kept = [d for d in order if copies.place != "alone" or d != copies.dim]
    lower = tuple(d - (copies.place == "alone" and d > copies.dim) for d in kept)
    like = replace(copies, dim=order.index(copies.dim))
    value = like.value_of_base(facts.need(node, Value))
    if value is None:
        return None
    if lower == tuple(range(len(lower))):
        return like
    return replace(like, base=emit.call("call_function", torch.permute, (copies.base, lower), value))


def _rows(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """Linear, and a product with a matrix: every row by itself."""
    copies = _only_first(node, known)
    weight = kinds.value_of(kinds.argument(node, 1, "weight"))
    fits = kinds.name_of(node) == "linear" or (weight is not None and len(weight.shape) == 2)
    if copies is None or not fits or copies.dim >= len(facts.need(node, Value).shape) - 1:
        return None
    return _first(node, emit, copies)


def _first(node: fx.Node, emit: Emit, copies: Copies, **kwargs: Any) -> Copies | None:
    """The operation on the base of its first argument, with the copies in the same dim."""
    return emit.once(copies, (copies.base, *node.args[1:]), {**node.kwargs, **kwargs})


def _samples(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """Convolutions: every sample of dim 0 by itself."""
    copies = _only_first(node, known)
    weight = kinds.value_of(kinds.argument(node, 1, "weight"))
    if copies is None or copies.dim != 0 or weight is None or len(weight.shape) != _rank(node):
        return None
    return _first(node, emit, emit.with_batch(copies))


def _rank(node: fx.Node) -> int:
    return len(facts.need(node, Value).shape)


def _pool(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """Pooling, padding and resizing over the last dims."""
    copies, name = _only_first(node, known), kinds.name_of(node)
    if copies is None:
        return None
    if name == "pad":
        space = len(kinds.argument(node, 1, "pad")) // 2
    else:
        space = _rank(node) - 2 if name == "interpolate" else int(name[-2])
    if copies.dim >= _rank(node) - space:
        return None
    return _first(node, emit, emit.with_batch(copies))


def _norm(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """BatchNorm knows how many copies it stands for; the others norm over dims without copies."""
    copies, name = _only_first(node, known), kinds.name_of(node)
    if copies is None:
        return None
    if node.target is ops.batch_norm:
        return _batch_norm(node, copies, emit)
    if name in ("layer_norm", "rms_norm"):
        return (
            _first(node, emit, copies)
            if copies.dim < _rank(node) - len(kinds.argument(node, 1, "normalized_shape"))
            else None
        )
    if name == "group_norm":
        return _first(node, emit, emit.with_batch(copies)) if copies.dim == 0 else None
    dim = kinds.argument(node, 1, "dim")
    if name not in ("softmax", "log_softmax") or not isinstance(dim, int) or copies.dim == dim % _rank(node):
        return None
    lower = _lowered((dim,), copies, _rank(node))[0]
    return emit.once(copies, (copies.base, lower, *node.args[2:]))


def _batch_norm(node: fx.Node, copies: Copies, emit: Emit) -> Copies | None:
    if copies.dim == 1:
        return None
    held = emit.with_batch(copies) if copies.dim == 0 else copies
    return emit.once(held, (held.base, *node.args[1:], copies.steps), target=ops.batch_norm_copies)


def _reduction(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """Sums and the like over dims without copies."""
    copies, given = _only_first(node, known), kinds.argument(node, 1, "dim")
    if copies is None or given is None or kinds.name_of(node) not in ("sum", "mean", "amax", "amin"):
        return None
    rank = len(facts.need(node.args[0], Value).shape)  # type: ignore[arg-type]
    gone = [d % rank for d in ((given,) if isinstance(given, int) else given)]
    if copies.dim in gone or not gone:
        return None
    keep = bool(kinds.argument(node, 2, "keepdim", False))
    after = copies.dim if keep else copies.dim - sum(d < copies.dim for d in gone)
    lower = _lowered(gone, copies, rank)
    rest = {name: item for name, item in node.kwargs.items() if name not in ("dim", "keepdim")}
    return emit.once(replace(copies, dim=after), (copies.base, lower, keep), rest)


def _lowered(given: Any, copies: Copies, rank: int) -> tuple[int, ...]:
    """Dims of the whole as dims of the base."""
    return tuple(d % rank - (copies.place == "alone" and d % rank > copies.dim) for d in given)


def _join(node: fx.Node, known: Known, emit: Emit) -> Copies | None:
    """`cat` along another dim, `stack` along a new one, of copies that lie alike."""
    items = node.args[0]
    if not isinstance(items, (tuple, list)) or not all(item in known for item in items):
        return None
    held = [known[item] for item in items]  # type: ignore[index]
    if len({(copies.dim, copies.steps, copies.place) for copies in held}) > 1:
        return None
    like, dim = held[0], kinds.argument(node, 1, "dim", 0) % _rank(node)
    stacked = kinds.name_of(node) == "stack"
    if dim == like.dim and not stacked:
        return None
    after = like.dim + (stacked and dim <= like.dim)
    lower = dim - (like.place == "alone" and dim > after)
    return emit.once(replace(like, dim=after), (tuple(copies.base for copies in held), lower), {})


Rule = Callable[[fx.Node, Known, Emit], Copies | None]
_RULES: Mapping[str, Rule] = {
    "elementwise": _elementwise, "view": _view, "permute": _permute, "linear": _rows, "matmul": _rows, "conv": _samples,
    "pool": _pool, "norm": _norm, "reduction": _reduction, "join": _join,
}  # fmt: skip
