"""A stage's graph made this rank's: on its device, reading its pieces of tensors, safe against its own assignments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from snnpart import ops
from snnpart.program import TensorSlice


def localise(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """A copy of the graph that makes its tensors on `device` and keeps what it reads of a buffer it later assigns.

    The user's code may bind a new tensor to a buffer's name while autograd holds the old one; `ops.assign` writes in
    place, so reads of such a buffer are copied.
    """
    local = fx.Graph()
    result = local.graph_copy(graph, {})
    if result is not None:
        local.output(result)
    assigned = {node.args[0].target for node in local.nodes if node.target is ops.assign}  # type: ignore[union-attr]
    for node in list(local.nodes):
        node.args = fx.node.map_aggregate(node.args, lambda a: _on(a, device))  # type: ignore[assignment]
        node.kwargs = {k: _on_keyword(k, v, device) for k, v in node.kwargs.items()}
        if node.op == "get_attr" and node.target in assigned:
            _copy_reads(local, node)
    return local


def cut_reads(graph: fx.Graph, parts: Iterable[TensorSlice]) -> None:
    """Have every read of the parts' tensors, which are held whole, take this rank's pieces."""
    known = {part.name: part for part in parts}
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.target in known:
            part = known[node.target]
            with graph.inserting_after(node):
                piece = graph.call_function(ops.select_pieces, (node, part.dim, part.pieces))
            node.replace_all_uses_with(piece, lambda user, piece=piece: user is not piece)  # type: ignore[misc]


def _copy_reads(graph: fx.Graph, read: fx.Node) -> None:
    with graph.inserting_after(read):
        kept = graph.call_method("clone", (read,))
    read.replace_all_uses_with(
        kept, lambda user: user is not kept and not (user.target is ops.assign and user.args[0] is read)
    )


def _on(argument: Any, device: torch.device) -> Any:
    return device if isinstance(argument, torch.device) else argument


def _on_keyword(name: str, argument: Any, device: torch.device) -> Any:
    if name == "device" and isinstance(argument, str):
        return device
    return fx.node.map_aggregate(argument, lambda a: _on(a, device))
