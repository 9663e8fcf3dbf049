"""Ranks without a channel: with more tp ranks than channels some ranks have nothing to do in a layer.

torch's convolutions and poolings refuse tensors without elements, or give wrong shapes (a convolution over no input
channels). So on such a rank an operation becomes `ops.vacant`: zeros of the right shape, and zeros as gradients, which
keep the rank in every collective. Neuron layers, batch norms, loops and what changes a buffer run as they are: they
keep their state, counters and random numbers in step with the other ranks.
"""

from __future__ import annotations

import torch
from torch import fx

from snnpart import facts, ops
from snnpart.effects import is_random, writes_buffer
from snnpart.facts import Origin, Spread, Stage, TimeRole, Value
from snnpart.ops_time import TIME_OPS, Nested
from snnpart.passes.rewrite.local_sizes import local_value

_RUN = frozenset({ops.batch_norm, ops.batch_norm_copies, ops.assign, ops.index_assign, *TIME_OPS})


def can_be_vacant(node: fx.Node) -> bool:
    """Whether the operation only computes one tensor from others."""
    if node.op not in ("call_function", "call_method") or facts.get(node, Value) is None or node.target in _RUN:
        return False
    acts = isinstance(node.target, Nested) or writes_buffer(node) or is_random(node)
    return not acts and any(facts.get(n, Value) is not None for n in node.all_input_nodes)


def vacant_node(graph: fx.Graph, node: fx.Node, spread: Spread, rank: int, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
    """What stands for `node` on the rank; `inputs` are its inputs as the rank holds them."""
    value = local_value(facts.need(node, Value), spread, rank)
    tensors = [inputs[n] for n in node.all_input_nodes if facts.get(n, Value) is not None]
    others = tuple(inputs[n] for n in node.all_input_nodes if facts.get(n, Value) is None)
    tensors.sort(key=lambda n: facts.need(n, Value).dtype != value.dtype)
    same = facts.need(tensors[0], Value).dtype == value.dtype
    reference = next(
        ((i, dim, held.shape[dim], held.slopes[dim]) for i, held in _held(tensors) for dim in held.batch_dims), None
    )
    dtype: torch.dtype | None = None if same else value.dtype
    args = (tuple(tensors), value.shape, value.slopes, reference, dtype, others)
    new = graph.create_node("call_function", ops.vacant, args, {}, node.name)
    origin = facts.origin(node)
    facts.put(new, value, Origin(origin.module, origin.file, origin.line, "shard-channels"))
    put_known(new, facts.get(node, Stage), facts.get(node, TimeRole))
    return new


def put_known(node: fx.Node, *found: Stage | TimeRole | None) -> None:
    """The facts that there are."""
    facts.put(node, *(fact for fact in found if fact is not None))


def _held(tensors: list[fx.Node]) -> list[tuple[int, Value]]:
    return [(i, facts.need(node, Value)) for i, node in enumerate(tensors)]
