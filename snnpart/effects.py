"""Which operations do more than compute their result: write a buffer, advance neuron state, draw random numbers, talk.

A node with an effect stays in the graph even when nobody uses its value, and keeps its place among the others.
"""

from __future__ import annotations

from torch import fx

from snnpart import ops
from snnpart.ops_time import TIME_OPS, Nested, leaf_paths

DROPOUTS = frozenset(
    ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"]
)
_DRAW_NAMES = (
    "rand randn randint randperm rand_like randn_like randint_like bernoulli poisson normal multinomial gumbel_softmax "
    "bernoulli_ normal_ uniform_ exponential_ random_ cauchy_ geometric_ log_normal_"
)
DRAWN = ("dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d", "rand_like", "randn_like")
"""Random operations of which a rank can keep its own part: a mask to multiply with, or numbers for each element."""

_RANDOM = frozenset([*DROPOUTS, "rrelu", *_DRAW_NAMES.split(), "drawn_slice"])
_NOT_IN_PLACE = frozenset({"__invert__", "__index__", "__int__", "__iter__", "and_", "or_"})


def is_random(node: fx.Node) -> bool:
    """True for a node that draws from the random number generator (also a dropout: it draws when training)."""
    if isinstance(node.target, Nested):
        return any(is_random(inner) for inner in node.target.nodes())
    if node.op == "call_method":
        return node.target in _RANDOM
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _RANDOM


def is_in_place(node: fx.Node) -> bool:
    """True for a call that writes into a tensor it is given (`add_`, `__iadd__`, `__setitem__`, `out=`)."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name in _NOT_IN_PLACE:
        return False
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_") or name == "setitem" or node.kwargs.get("out") is not None


def writes_buffer(node: fx.Node) -> bool:
    """True for an assignment, and for a BatchNorm that keeps running statistics."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, Nested):
        return any(writes_buffer(inner) for inner in node.target.nodes())
    if node.target is ops.assign:
        return True
    return node.target in (ops.batch_norm, ops.batch_norm_copies, *TIME_OPS) and any(
        isinstance(arg, fx.Node) for arg in node.args[3:6]
    )


def has_effect(node: fx.Node) -> bool:
    """True when the node must run even if its value is not used."""
    return (
        node.op in ("placeholder", "output")
        or bool(leaf_paths(node))
        or (node.op == "call_function" and node.target in ops.COLLECTIVES)
        or writes_buffer(node)
        or is_random(node)
        or is_in_place(node)
    )
