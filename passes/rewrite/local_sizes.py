"""Numbers in a graph that count channels, made local to a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import facts
from snnpart.facts import Placement, Sharded, Spread, Value, Values

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_GROUPS = 6


def local_arguments(node: fx.Node, placement: Placement, rank: int) -> Arguments:
    """The node's arguments with local sizes. Sizes given as -1 or by a node stay."""
    args, kwargs = node.args, dict(node.kwargs)
    if not isinstance(placement.output, Sharded):
        return args, kwargs
    if placement.rule == "group":
        return _local_groups(node, placement, rank)
    rewrite = _SIZES.get(node.target) if node.op == "call_function" else _METHODS.get(str(node.target))
    return rewrite(node, placement.output, rank) if rewrite else (args, kwargs)


def local_value(value: Value, spread: Spread, rank: int) -> Value:
    """The value as rank `rank` holds it; strides of a sharded value are not known."""
    if not isinstance(spread, Sharded):
        return value
    shape = (*value.shape[: spread.dim], spread.size(rank), *value.shape[spread.dim + 1 :])
    return replace(value, shape=shape, stride=())


def _local_groups(node: fx.Node, placement: Placement, rank: int) -> Arguments:
    """A grouped convolution: as many groups as the rank's input channels hold."""
    x = node.all_input_nodes[0]
    lane = placement.inputs[0]
    if not isinstance(lane, Sharded):
        return node.args, dict(node.kwargs)
    count: Any = node.args[_GROUPS] if len(node.args) > _GROUPS else node.kwargs["groups"]
    groups = lane.size(rank) * count // facts.need(x, Value).shape[lane.dim]
    if len(node.args) > _GROUPS:
        return (*node.args[:_GROUPS], groups, *node.args[_GROUPS + 1 :]), dict(node.kwargs)
    return node.args, {**node.kwargs, "groups": groups}


def _reshape(node: fx.Node, spread: Sharded, rank: int) -> Arguments:
    if len(node.args) > 1:
        return (node.args[0], _with(node.args[1], spread.dim, spread.size(rank))), dict(node.kwargs)
    return node.args, {**node.kwargs, "shape": _with(node.kwargs["shape"], spread.dim, spread.size(rank))}


def _unflatten(node: fx.Node, spread: Sharded, rank: int) -> Arguments:
    given: list[Any] = [node.args[i] if len(node.args) > i else node.kwargs[n] for i, n in ((1, "dim"), (2, "sizes"))]
    dim, sizes = given
    rank_in = len(facts.need(node.all_input_nodes[0], Value).shape)
    local = _with(sizes, spread.dim - dim % rank_in, spread.size(rank))
    return (node.args[0], dim, local), {}


def _expand(node: fx.Node, spread: Sharded, rank: int) -> Arguments:
    """expand's sizes, given as one tuple or one by one."""
    if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)):
        return (node.args[0], _with(node.args[1], spread.dim, spread.size(rank))), dict(node.kwargs)
    return (node.args[0], *_with(node.args[1:], spread.dim, spread.size(rank))), dict(node.kwargs)


def _split(node: fx.Node, spread: Sharded, rank: int) -> Arguments:
    """Sizes of the parts, where they are parts of the sharded dim: each, for a rank may have nothing of them."""
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if dim % len(facts.need(node.all_input_nodes[0], Value).shape) != spread.dim:
        return node.args, dict(node.kwargs)
    parts = len(facts.need(node, Values).items)
    return (node.args[0], [spread.size(rank)] * parts, *node.args[2:]), dict(node.kwargs)


def _squeeze(node: fx.Node, spread: Sharded, rank: int) -> Arguments:
    """The dims by name: on a rank with one channel they are not those of size 1."""
    if len(node.args) > 1 or node.kwargs:
        return node.args, dict(node.kwargs)
    value = facts.need(node.all_input_nodes[0], Value)
    sizes = enumerate(zip(value.shape, value.slopes, strict=True))
    return (node.args[0], tuple(dim for dim, (size, slope) in sizes if size == 1 and not slope)), {}


def _group_norm(node: fx.Node, spread: Sharded, rank: int) -> Arguments:
    count: Any = node.args[1]
    whole = facts.need(node.all_input_nodes[0], Value).shape[1]
    return (node.args[0], spread.size(rank) * count // whole, *node.args[2:]), dict(node.kwargs)


def _with(sizes: Any, dim: int, local: int) -> tuple[Any, ...]:
    """The sizes with entry `dim` local; entries outside the tuple, -1 and sizes that a node gives stay."""
    own = list(sizes)
    if 0 <= dim < len(own) and isinstance(own[dim], int) and own[dim] != -1:
        own[dim] = local
    return tuple(own)


_SIZES: Mapping[Any, Callable[[fx.Node, Sharded, int], Arguments]] = {
    torch.reshape: _reshape,
    torch.unflatten: _unflatten,
    torch.split: _split,
    torch.squeeze: _squeeze,
    torch.group_norm: _group_norm,
    F.group_norm: _group_norm,
}
_METHODS: Mapping[str, Callable[[fx.Node, Sharded, int], Arguments]] = {"expand": _expand}
