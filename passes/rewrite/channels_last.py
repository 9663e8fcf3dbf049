"""channels-last: images of convolutional regions lie in memory with their channels last.

On a GPU convolutions compute in that layout; given another they convert what they read and write at every call. The
pass says it once, in the graph: what a convolution reads is converted where it is not in that layout already, and
convolutions, norms, fused neurons, pooling, additions and views that merge or split the leading dims hand it on. So a
region has one conversion at each entry, and no operation inside makes another (a test counts them).

Weights of these convolutions are kept in the same order (`TensorSlice.channels_last`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import facts, ops, ops_time
from snnpart.facts import Origin, Value
from snnpart.ops import Surrogate
from snnpart.ops_fused import FusedNeuron, splits_time
from snnpart.passes.analyze.kinds import kind_of

NAME = "channels-last"
_CONVOLUTIONS = (torch.conv2d, F.conv2d, torch.conv_transpose2d, F.conv_transpose2d)
_NORMS = (ops.batch_norm, ops.batch_norm_copies, *ops_time.TIME_OPS)
_KEEPING_COLLECTIVES = (ops.all_reduce, ops.grad_all_reduce)


def channels_last(graph: fx.Graph) -> frozenset[str]:
    """Put the convolutional regions of a stage graph into channels-last, in place; the weights that should lie so."""
    last: set[fx.Node] = set()
    weights: set[str] = set()
    converted: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if _is_convolution(node):
            _convert_input(graph, node, last, converted)
            weights |= {str(item.target) for item in node.args[1:2] if isinstance(item, fx.Node) and _is_read(item)}
            last.add(node)
        elif _keeps(node, last):
            last.add(node)
    return frozenset(weights)


def _is_convolution(node: fx.Node) -> bool:
    value = facts.get(node, Value)
    return node.op == "call_function" and node.target in _CONVOLUTIONS and value is not None and len(value.shape) == 4


def _is_read(node: fx.Node) -> bool:
    return node.op == "get_attr"


def _convert_input(graph: fx.Graph, node: fx.Node, last: set[fx.Node], converted: dict[fx.Node, fx.Node]) -> None:
    source: Any = node.args[0]
    if source in last:
        return
    if source not in converted:
        with graph.inserting_before(node):
            made = graph.call_method("contiguous", (source,), {"memory_format": torch.channels_last})
        made.meta = dict(source.meta)
        origin = facts.get(node, Origin) or Origin()
        facts.put(made, Origin(origin.module, origin.file, origin.line, NAME))
        converted[source] = made
        last.add(made)
    node.replace_input_with(source, converted[source])


def _keeps(node: fx.Node, last: set[fx.Node]) -> bool:
    """Whether a node's result is in channels-last because its inputs are."""
    value = facts.get(node, Value)
    if value is None or len(value.shape) not in (4, 5) or node.op not in ("call_function", "call_method"):
        return False
    if splits_time(node) or node.target in _NORMS or isinstance(node.target, FusedNeuron):
        return node.args[0] in last
    if node.target in _KEEPING_COLLECTIVES:
        return node.args[0] in last
    if kind_of(node) in ("elementwise", "pool", "join") or isinstance(node.target, Surrogate):
        return _all_last(node, value, last)
    return False


def _all_last(node: fx.Node, value: Value, last: set[fx.Node]) -> bool:
    """Whether every input that is as large as the result lies so, and there is one; a smaller one is broadcast."""
    pooled = kind_of(node) in ("pool", "join")
    whole = [
        item
        for item in node.all_input_nodes
        if (own := facts.get(item, Value)) is not None
        and (len(own.shape) == len(value.shape) if pooled else own.shape == value.shape)
    ]
    return bool(whole) and all(item in last for item in whole)
