"""What the report says of single nodes: collectives with their bytes, and the nodes to draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from snnpart import facts, ops
from snnpart.bits import packed_bytes
from snnpart.facts import Cost, Placement, Value
from snnpart.ops_time import Loop
from snnpart.program import CompiledProgram
from snnpart.report.data import CollectiveRow, GraphNode

MOVES: dict[Any, tuple[bool, bool]] = {
    ops.all_reduce: (True, False),
    ops.grad_all_reduce: (False, True),
    ops.all_gather: (True, False),
    ops.shard: (False, True),
    ops.reduce_scatter: (True, True),
}
"""Whether a collective moves its (whole) value forward, and backward."""

_HIDDEN = frozenset({"batch_size"})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def costs(compiled: CompiledProgram) -> dict[str, Cost]:
    """Cost by the name of a node of the source graph."""
    found = ((node.name, facts.get(node, Cost)) for node in compiled.source.graph.nodes)
    return {name: cost for name, cost in found if cost is not None}


def operation(node: fx.Node, compiled: CompiledProgram) -> str:
    """A short name of what the node does: `conv2d`, `LIFNode`, `all_reduce`."""
    if node.op == "call_module":
        leaf = compiled.source.leaves.get(str(node.target))
        return type(leaf.module).__name__ if leaf is not None else str(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target)).strip("_")
    if node.op == "placeholder":
        return "input"
    return str(node.target) if node.op == "call_method" else node.op


def collectives(compiled: CompiledProgram) -> tuple[CollectiveRow, ...]:
    """Every collective of the program, in the order in which tp rank 0 runs them; one in rounds with those of all."""
    return tuple(
        _collective(node, stage, times)
        for stage in range(compiled.plan.stage_count)
        for node, times in _in_rounds(compiled.stage(stage, 0).graph)
    )


def _in_rounds(graph: fx.Graph) -> Iterator[tuple[fx.Node, float]]:
    """The collectives of a stage, and how often the ranks send such a value in a pass."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in MOVES:
            yield node, 1.0
        elif isinstance(node.target, Loop) and node.target.together:
            for inner, times in _in_rounds(node.target.body):
                yield inner, times * node.target.steps / node.target.together


def _collective(node: fx.Node, stage: int, times: float) -> CollectiveRow:
    forward, backward = MOVES[node.target]
    shape, dtype = _whole_shape(node)
    size = round(torch.Size(shape).numel() * dtype.itemsize * times)
    there, back = size * forward, size * backward
    if node.target is ops.all_gather:
        states, partial = ops.gather_options(node)
        there = round(packed_bytes(torch.Size(shape).numel(), states[1]) * times) if states else size
        back = size * partial
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("axis", "tp")
    return CollectiveRow(
        node.name,
        stage,
        facts.origin(node).module,
        operation_name(node),
        str(axis),
        shape,
        dtype_name(dtype),
        there,
        back,
    )


def operation_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _whole_shape(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of the value before it is cut, or after it was put together."""
    cut = node.target in (ops.shard, ops.reduce_scatter)
    holder = node.all_input_nodes[0] if cut else node
    value = facts.get(holder, Value) or facts.get(node, Value)
    return (value.shape, value.dtype) if value is not None else ((), torch.float32)


def drawn(compiled: CompiledProgram) -> tuple[GraphNode, ...]:
    """The nodes of every stage on tp rank 0, in order, tensors and sizes left out."""
    known, source = costs(compiled), {node.name: node for node in compiled.source.graph.nodes}
    rows: list[GraphNode] = []
    sent: dict[str, int] = {}
    for stage in range(compiled.plan.stage_count):
        program = compiled.stage(stage, 0)
        received = {port.name for port in program.receives}
        places: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            if node.op in ("get_attr", "output") or node.name in _HIDDEN or _is_number(node):
                continue
            if node.op == "placeholder" and str(node.target) in received and str(node.target) in sent:
                places[node] = sent[str(node.target)]
                continue
            places[node] = len(rows)
            inputs = tuple(places[i] for i in node.all_input_nodes if i in places)
            rows.append(_row(node, stage, inputs, known, source.get(node.name), compiled))
        sent.update(_sent(program, places))
    return tuple(rows)


def _sent(program: Any, places: dict[fx.Node, int]) -> dict[str, int]:
    """Where the values that the stage sends on are made: name of the port -> index of the drawn node."""
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    values = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    pairs = zip(program.sends, values, strict=False)
    return {port.name: places[node] for port, node in pairs if node in places}


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.affine


def _row(
    node: fx.Node,
    stage: int,
    inputs: tuple[int, ...],
    known: dict[str, Cost],
    source: fx.Node | None,
    compiled: CompiledProgram,
) -> GraphNode:
    value = facts.get(node, Value)
    placement = facts.get(node, Placement) or (facts.get(source, Placement) if source is not None else None)
    cost = facts.get(node, Cost) or known.get(node.name, Cost())
    return GraphNode(
        name=node.name,
        stage=stage,
        module=facts.origin(node).module,
        operation=operation(node, compiled),
        kind=_kind(node, compiled),
        shape=value.shape if value is not None else (),
        placement=str(placement.output) if placement is not None else "",
        us=cost.us,
        inputs=inputs,
    )


def _kind(node: fx.Node, compiled: CompiledProgram) -> str:
    """input, neuron, collective, layer (reads a tensor of the network) or operation."""
    if node.op == "placeholder":
        return "input"
    if node.op == "call_module":
        leaf = compiled.source.leaves.get(str(node.target))
        return "neuron" if leaf is not None and leaf.neuron else "layer"
    if node.target in MOVES:
        return "collective"
    return "layer" if any(i.op == "get_attr" for i in node.all_input_nodes) else "operation"
