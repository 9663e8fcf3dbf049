"""What is computed from the network's tensors alone, once.

A decay that a neuron makes of its time constant at every step (`exp(-1 / tau)`) is the same value T times. Made once,
it belongs to no step. Its gradient is the sum of those of all uses, in another order.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from snnpart import effects, facts
from snnpart.facts import Value


def compute_once(graph: fx.Graph) -> None:
    """Let every use of the same computation on tensors that nothing writes read its first copy."""
    written = {s.target for node in graph.nodes if effects.writes_buffer(node) for s in node.all_input_nodes}
    first: dict[Any, fx.Node] = {}
    standing: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if not _only_of_tensors(node, standing, written):
            continue
        args = map_arg((node.args, dict(node.kwargs)), lambda source: standing[source])
        standing[node] = first.setdefault((node.op, node.target, repr(args), _gradient(node)), node)
        if standing[node] is not node:
            node.replace_all_uses_with(standing[node])
            graph.erase_node(node)


def _only_of_tensors(node: fx.Node, known: dict[fx.Node, fx.Node], written: set[Any]) -> bool:
    if node.op == "get_attr":
        return node.target not in written
    computes = node.op in ("call_function", "call_method") and bool(node.all_input_nodes)
    return computes and all(s in known for s in node.all_input_nodes) and not effects.has_effect(node)


def _gradient(node: fx.Node) -> bool:
    value = facts.get(node, Value)
    return value is not None and value.requires_grad
