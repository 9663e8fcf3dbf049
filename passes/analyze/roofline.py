"""What the operations of a rank's stage graphs need at the least, each task of each of them (`snnpart.roofline`).

The graphs are those that run, with fused neurons in them. Their values are first given the sizes of the step's batch
and the dtypes that autocast makes: products compute in the low precision, a few functions in float32, and everything
else in what it is given.

A product's backward has a product for each operand that needs a gradient; one that reads the images has none for them.
A neuron, or a norm and a neuron, reads x and the residual and writes the spikes; backward it reads x and the gradient
and writes x's (the residual's is the gradient itself). Views, layout changes and collectives need nothing. Gradients
of weights are written at the parameter's dtype. Under autocast each weight of a product is cast once a step. AdamW
reads parameter, gradient and two moments, and writes all but the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.facts import Value, Values
from snnpart.graph import copied
from snnpart.ops_fused import FusedNeuron, parts
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.cost import operation_flops, product_flops, result_bytes
from snnpart.passes.analyze.kinds import first_value, kind_of, name_of
from snnpart.program import CompiledProgram, StageProgram
from snnpart.roofline import Task, Work

_PRODUCTS: Mapping[str, tuple[Task, Task, Task]] = {
    "conv": ("convolution", "convolution dgrad", "convolution wgrad"),
    "linear": ("product", "product gradients", "product gradients"),
    "matmul": ("product", "product gradients", "product gradients"),
}
"""The tasks of a product: forward, and the gradients of its two operands."""
_OTHERS: Mapping[str, tuple[Task, Task]] = {"norm": ("norm", "norm backward"), "pool": ("pool", "pool backward")}
_FULL_NAMES = (
    "softmax log_softmax layer_norm group_norm exp expm1 log log1p pow reciprocal rsqrt softplus sum prod cumsum norm "
    "tan"
)
_FULL = frozenset(_FULL_NAMES.split())
"""What autocast computes in float32 on CUDA."""
_FREE_NAMES = (
    "contiguous channels_last to clone all_reduce grad_all_reduce all_gather reduce_scatter shard select_pieces"
)
_FREE = kinds.VIEWS | frozenset(_FREE_NAMES.split())
"""Views, changes of layout and dtype, and what communicates."""
_MOVED_BY_ADAMW = 7
"""Tensors of the parameter's size: parameter, gradient and two moments read, all but the gradient written."""


def roofline(
    compiled: CompiledProgram,
    machine: MachineProfile,
    batch: int,
    low: torch.dtype | None = None,
    rank: tuple[int, int] = (0, 0),
    shards: int = 1,
) -> tuple[Work, ...]:
    """The work of a train step of one rank, with AdamW.

    Args:
        batch: samples of the step on this rank's replica.
        low: autocast's dtype; None without autocast.
        rank: its place (on pp, on tp).
        shards: ranks among which the optimizer's work is dealt out.
    """
    found: list[Work] = []
    for program in compiled.of_rank(*rank):
        graph = _as_it_runs(program, batch - compiled.source.batch, low)
        count = _Counting(compiled, machine, batch / compiled.source.batch, low)
        found += [work for node in graph.nodes if node.op != "output" for work in count.of(node)]
        found += count.casts(graph)
        found += count.optimizer(program, shards)
    return tuple(found)


def _as_it_runs(program: StageProgram, change: int, low: torch.dtype | None) -> fx.Graph:
    """A copy of the stage's graph whose values have the batch's sizes and autocast's dtypes."""
    made = copied(program.graph)
    received = {port.name for port in program.receives}
    for node in made.nodes:
        value, several = facts.get(node, Value), facts.get(node, Values)
        if value is None and several is None:
            continue
        dtype = None if low is None else low if node.name in received else _autocast(node, low)
        change_one = lambda item, dtype=dtype: _changed(item, change, dtype)  # noqa: E731
        if value is not None:
            facts.put(node, change_one(value))
        if several is not None:
            facts.put(node, Values(tuple(change_one(x) if isinstance(x, Value) else x for x in several.items)))
    return made


def _changed(value: Value, change: int, dtype: torch.dtype | None) -> Value:
    new = dtype if dtype is not None and value.dtype is torch.float32 else value.dtype
    return replace(value, shape=value.shape_at(change), dtype=new)


def _autocast(node: fx.Node, low: torch.dtype) -> torch.dtype | None:
    """The dtype in which autocast makes a float32 value; None where it stays."""
    if node.op in ("placeholder", "get_attr") or name_of(node) in _FULL:
        return None
    if kind_of(node) in _PRODUCTS:
        return low
    found = [value.dtype for item in _carriers(node) if (value := first_value(item)) is not None and value.shape]
    floats = [dtype for dtype in found if dtype.is_floating_point]
    return reduce(torch.promote_types, floats) if floats else None


def _carriers(node: fx.Node) -> list[fx.Node]:
    """The inputs that decide about the result's dtype, and that grow with the batch: not the tensors of a norm."""
    if isinstance(node.target, FusedNeuron):
        return [item for item in _of_fused(node) if item is not None]
    if kind_of(node) == "norm":
        return [item for item in node.args[:1] if isinstance(item, fx.Node)]
    return kinds.tensor_inputs(node)


def _of_fused(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """x and the residual of a fused neuron."""
    target: Any = node.target
    found = parts(target.region)
    given = dict(zip((n for n in target.region.nodes if n.op == "placeholder"), node.args, strict=True))
    x: Any = given[found.x]
    residual: Any = None if found.residual is None else given[found.residual]
    return x, residual


@dataclass(frozen=True)
class _Counting:
    """Counts the work of nodes whose values are those of the step; `growth` is its batch over the example's."""

    compiled: CompiledProgram
    machine: MachineProfile
    growth: float
    low: torch.dtype | None

    def of(self, node: fx.Node) -> Iterator[Work]:
        """The tasks of one operation."""
        value = first_value(node)
        idle = node.op in ("placeholder", "get_attr") or name_of(node) in _FREE or isinstance(node.target, type)
        if value is None or idle or kind_of(node) == "factory":
            return
        if kind_of(node) in _PRODUCTS:
            yield from self._product(node, value)
        elif isinstance(node.target, (FusedNeuron, Loop)) or node.op == "call_module":
            yield from self._neuron(node, value)
        else:
            yield from self._other(node, value)

    def _work(self, task: Task, node: fx.Node, flops: float, moved: float, dtype: torch.dtype) -> Work:
        us = 1e6 * max(flops / self.machine.flop_rate(dtype), moved / self.machine.copy)
        return Work(task, facts.origin(node).module, flops, moved, us)

    def _product(self, node: fx.Node, value: Value) -> Iterator[Work]:
        """A product and those of its backward; three operands (attention) are two products."""
        operands = [item for item in node.args[:3] if isinstance(item, fx.Node) and first_value(item) is not None]
        if name_of(node) != "scaled_dot_product_attention":
            operands = operands[:2]
        forward, *backward = _PRODUCTS[kind_of(node)]
        flops, out = operation_flops(node, value), float(value.bytes)
        sizes = [self._read(item) for item in operands]
        yield self._work(forward, node, flops, sum(sizes) + out, value.dtype)
        for place, item in enumerate(operands):
            own = first_value(item)
            if value.requires_grad and own is not None and own.requires_grad:
                moved = sum(sizes) - sizes[place] + out + own.bytes
                yield self._work(backward[min(place, 1)], node, flops, moved, value.dtype)

    def _read(self, operand: fx.Node) -> float:
        """Bytes of a product's operand as it is read: at the low precision, where autocast casts it."""
        value = first_value(operand)
        if value is None:
            return 0.0
        cast = self.low is not None and value.dtype is torch.float32
        return float(value.numel * self.low.itemsize if cast and self.low is not None else value.bytes)

    def _neuron(self, node: fx.Node, value: Value) -> Iterator[Work]:
        """All steps of a neuron, or of a loop with the products in it."""
        fused = isinstance(node.target, FusedNeuron)
        first, residual = _of_fused(node) if fused else (None, None)
        inputs = _streams(node) if first is None else [first]
        read, out = sum(map(_size, inputs)), _size(node)
        flops = 0.0 if fused else self.growth * product_flops(node, self.compiled.source)
        yield self._work("neuron", node, flops, read + _size(residual) + out, value.dtype)
        if value.requires_grad:
            made = sum(_size(item) for item in inputs if _needs(item))
            yield self._work("neuron backward", node, 2 * flops, read + out + made, value.dtype)

    def _other(self, node: fx.Node, value: Value) -> Iterator[Work]:
        """Norms, pools, and whatever moves its operands once; backward reads the gradient, a norm's x too."""
        forward, backward = _OTHERS.get(kind_of(node), ("rest", "rest backward"))
        inputs, out = _carriers(node), _size(node)
        yield self._work(forward, node, 0.0, sum(map(_size, inputs)) + out, value.dtype)
        if value.requires_grad:
            again = _size(inputs[0]) if forward == "norm" and inputs else 0.0
            moved = out + again + sum(_size(item) for item in inputs if _needs(item))
            yield self._work(backward, node, 0.0, moved, value.dtype)

    def casts(self, graph: fx.Graph) -> Iterator[Work]:
        """Weights of products, read as they are and written in the low precision."""
        if self.low is None:
            return
        read = {item: None for node in graph.nodes if kind_of(node) in _PRODUCTS for item in node.all_input_nodes}
        for item in read:
            value = facts.get(item, Value)
            if item.op == "get_attr" and value is not None and value.dtype is torch.float32:
                yield self._work("weight casts", item, 0.0, value.numel * (4.0 + self.low.itemsize), value.dtype)

    def optimizer(self, program: StageProgram, shards: int) -> Iterator[Work]:
        """AdamW's step over the stage's parameters."""
        for part in program.tensors:
            if part.kind == "parameter" and part.requires_grad and part.has_gradient:
                size = float(torch.Size(part.shape).numel() * part.dtype.itemsize) / shards
                us = 1e6 * _MOVED_BY_ADAMW * size / self.machine.copy
                yield Work("optimizer", part.name.rpartition(".")[0], 0.0, _MOVED_BY_ADAMW * size, us)


def _streams(node: fx.Node) -> list[fx.Node]:
    """What a neuron layer or a loop is given that grows with the batch: not the parameters that each step reads."""
    return [item for item in kinds.tensor_inputs(node) if item.op != "get_attr"]


def _size(node: fx.Node | None) -> float:
    return 0.0 if node is None else result_bytes(node)


def _needs(node: fx.Node) -> bool:
    """Whether a node's (first) result needs a gradient."""
    value = first_value(node)
    return value is not None and value.requires_grad
