"""fold-norms: in the graph that evaluations run, a BatchNorm becomes part of the layer before it (`numerics="fold"`).

It works on a copy of a stage's graph, so the training program stays as it is. The layer (a convolution, transposed or
not, or a linear one) is given the weight and bias of `ops_fold`, made of the live tensors at each evaluation, and the
norm goes. Between the two may stand views and permutations, as long as the layer's output channels are what the
norm takes for its channels. Channels that are dealt out over tp are those of weight, bias and norm alike.

A norm stays, and says why, where others read what it reads, where the batch's own statistics are used in eval, or where
what comes before it is no such layer. One inside a fused neuron is that kernel's: it costs no pass over memory there,
while a convolution's bias is a pass of its own on a GPU. So is one behind a sum over tp ranks, to which a bias must be
added once and not by each rank. One that has no channels on this rank is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from snnpart import facts, ops, ops_fold
from snnpart.facts import Origin, Value
from snnpart.ops_fused import NORMS, FusedNeuron, parts
from snnpart.ops_time import Nested
from snnpart.passes.analyze.kinds import argument, kind_of, name_of

NAME = "fold-norms"
_SUMS = (ops.all_reduce, ops.reduce_scatter)


@dataclass(frozen=True)
class Folded:
    """The norms that a graph has lost, by place, and why each of the others stays."""

    gone: tuple[str, ...]
    stays: tuple[str, ...]


@dataclass(frozen=True)
class _Layer:
    """The layer before a norm: where its weight has its output channels, and in how many groups."""

    node: fx.Node
    dim: int
    groups: int


def fold_norms(graph: fx.Graph) -> Folded:
    """Fold what can be in a stage graph of an evaluation, in place."""
    gone: list[str] = []
    stays = list(_inside_others(graph))
    made: dict[Any, fx.Node] = {}
    for norm in [node for node in graph.nodes if node.target in NORMS and facts.need(node, Value).numel]:
        where, found = facts.place(norm), _layer_before(norm)
        if isinstance(found, str):
            stays.append(f"{where} is not folded in eval: {found}")
        else:
            gone.append(where)
            _fold(graph, norm, found, made)
    return Folded(tuple(gone), tuple(stays))


def _inside_others(graph: fx.Graph) -> Iterator[str]:
    """The norms that are parts of a fused neuron, or of a loop's body."""
    for node in graph.nodes:
        if isinstance(node.target, FusedNeuron):
            norm = parts(node.target.region).norm
            if norm is not None:
                yield f"{facts.place(norm)} is not folded in eval: it is part of the neuron's kernel"
        elif isinstance(node.target, Nested):
            norms = (inner for inner in node.target.nodes() if inner.target in NORMS)
            yield from (f"{facts.place(norm)} is not folded in eval: it runs in a loop over time" for norm in norms)


def _layer_before(norm: fx.Node) -> _Layer | str:
    """The layer that can take the norm in, or why none can."""
    if norm.args[3] is None or norm.args[6] is True:
        return "it uses the batch's own statistics in eval"
    if any(isinstance(item, fx.Node) and item.op != "get_attr" for item in norm.args[1:5]):
        return "its tensors are computed by the network"
    node, channel = norm.args[0], 1
    while isinstance(node, fx.Node):
        if node.op == "placeholder":
            return "it reads an input of its stage"
        if len(node.users) > 1:
            return f"{facts.place(node)}, which it reads, has other readers"
        layer = _as_layer(node, channel)
        if layer is not None:
            return layer
        moved = _channel_before(node, channel)
        if moved is None:
            break
        node, channel = node.args[0], moved
    assert isinstance(node, fx.Node)
    if node.target in _SUMS or any(item.target in _SUMS for item in node.all_input_nodes if node.target is torch.add):
        return "the sum over tp ranks stands between it and its layer"
    return f"{facts.place(node)} before it is no convolution and no linear layer"


def _as_layer(node: fx.Node, channel: int) -> _Layer | str | None:
    """The node as a layer with its output channels in dim `channel`."""
    value, kind = facts.get(node, Value), kind_of(node)
    if value is None or kind not in ("conv", "linear") or not isinstance(node.args[1], fx.Node):
        return None
    if channel != (1 if kind == "conv" else len(value.shape) - 1):
        return f"the channels of {facts.place(node)} are not those that it normalises"
    transposed = "transpose" in name_of(node)
    groups: Any = argument(node, 6, "groups", 1) if transposed else 1
    return _Layer(node, int(transposed), groups)


def _channel_before(node: fx.Node, channel: int) -> int | None:
    """Dim `channel` of a view's result as a dim of its source; None where the node does more than move dims."""
    given, made = (facts.get(item, Value) if isinstance(item, fx.Node) else None for item in (node.args[0], node))
    if given is None or made is None:
        return None
    name = name_of(node)
    if name == "contiguous":
        return channel
    if name in ("reshape", "flatten", "unflatten", "view"):
        return _with_as_much_before(given.shape, made.shape, channel)
    if name in ("transpose", "swapaxes"):
        dims: Any = node.args[1:3]
        a, b = (int(dim) % len(made.shape) for dim in dims)
        return {a: b, b: a}.get(channel, channel)
    if name == "permute":
        order: Any = node.args[1]
        return int(order[channel]) % len(made.shape)
    return None


def _with_as_much_before(given: tuple[int, ...], made: tuple[int, ...], channel: int) -> int | None:
    """The dim of `given` that a reshape to `made` leaves as dim `channel`: as large, and behind as many elements."""
    outer = math.prod(made[:channel])
    same = (dim for dim, size in enumerate(given) if size == made[channel] and math.prod(given[:dim]) == outer)
    return next(same, None)


def _fold(graph: fx.Graph, norm: fx.Node, layer: _Layer, made: dict[Any, fx.Node]) -> None:
    """Give the layer the tensors of both, and its readers' readers what it makes."""
    _, gamma, beta, mean, var, *_ = norm.args
    eps, node, bias = norm.args[8], layer.node, argument(layer.node, 2, "bias")
    weight = (node.args[1], gamma, var, eps, layer.dim, layer.groups)
    scaled = _once(graph, node, ops_fold.scaled_weight, weight, node.args[1], made)
    shifted = _once(graph, node, ops_fold.shifted_bias, (bias, gamma, beta, mean, var, eps), mean, made)
    node.args = (node.args[0], scaled, shifted, *node.args[3:])
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "bias"}
    source: Any = norm.args[0]
    norm.replace_all_uses_with(source)
    graph.erase_node(norm)


def _once(
    graph: fx.Graph, layer: fx.Node, function: Any, args: tuple[Any, ...], like: Any, made: dict[Any, fx.Node]
) -> fx.Node:
    """The call before the layer, which has one although it is called at several steps."""
    key = (function, *(item.target if _is_read(item) else item for item in args))
    if key not in made:
        with graph.inserting_before(layer):  # the norm's own reads may stand behind it
            found = graph.call_function(function, tuple(graph.node_copy(a) if _is_read(a) else a for a in args))
        value, origin = facts.get(like, Value), facts.origin(layer)
        facts.put(found, *([] if value is None else [value]), Origin(origin.module, origin.file, origin.line, NAME))
        made[key] = found
    return made[key]


def _is_read(item: Any) -> bool:
    return isinstance(item, fx.Node) and item.op == "get_attr"
