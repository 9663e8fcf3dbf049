"""Which operations do more than compute their result: write a buffer, advance neuron state, draw random numbers, talk.

A node with an effect stays in the graph even when nobody uses its value, and keeps its place among the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import ops

_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    getattr(where, name)
    for where in (torch, F)
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu")
    if hasattr(where, name)
)
_RANDOM_NAMES = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli poisson normal multinomial gumbel_softmax "
    "bernoulli_ normal_ uniform_ exponential_ random_ cauchy_ geometric_ log_normal_".split()
)


def is_random(node: fx.Node) -> bool:
    """True for a node that draws from the random number generator (also a dropout: it draws when training)."""
    if node.op == "call_method":
        return node.target in _RANDOM_NAMES
    if node.op != "call_function":
        return False
    return node.target in _DROPOUTS or getattr(node.target, "__name__", "") in _RANDOM_NAMES


def is_in_place(node: fx.Node) -> bool:
    """True for a tensor method that writes into the tensor it is called on (`add_`, `__iadd__`, `__setitem__`)."""
    if node.op != "call_method":
        return False
    name = str(node.target)
    dunder = name.startswith("__")
    in_place_dunder = name == "__setitem__" or (dunder and name.startswith("__i") and name not in _I_DUNDERS)
    return in_place_dunder or (name.endswith("_") and not dunder)


_I_DUNDERS = frozenset({"__invert__", "__index__", "__int__", "__iter__"})


def writes_buffer(node: fx.Node) -> bool:
    """True for an assignment, and for a BatchNorm that keeps running statistics."""
    if node.op != "call_function":
        return False
    if node.target is ops.assign:
        return True
    return node.target is ops.batch_norm and any(isinstance(arg, fx.Node) for arg in node.args[3:6])


def has_effect(node: fx.Node) -> bool:
    """True when the node must run even if its value is not used."""
    return (
        node.op in ("placeholder", "output", "call_module")
        or (node.op == "call_function" and node.target in ops.COLLECTIVES)
        or writes_buffer(node)
        or is_random(node)
        or is_in_place(node)
    )
