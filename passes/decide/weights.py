"""Weights that are computed from others: they are cut where they are made, so that what they are made of is cut too.

A weight behind a parametrisation (weight norm, standardisation, a mask) is no tensor of the network but the result of
operations on tensors alone. Lanes do not reach them: they start at activations. So what the readers need is carried
backwards here, through every operation whose row of the sharding table gives that result.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from snnpart.facts import Sharded, Spread
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.rules import Ask, Declined, Row, is_tensor, replicate, shape
from snnpart.passes.decide.table import follow


def rows_of_weights(graph: SpikeGraph, chosen: Mapping[fx.Node, Row], tp: int) -> dict[fx.Node, Row]:
    """Rows of operations on tensors alone, given those of their readers."""
    found: dict[fx.Node, Row] = {}
    made = made_of_tensors(graph.graph)
    for node in reversed(graph.graph.nodes):
        wanted = _wanted(node, {**chosen, **found}) if node in made and node not in chosen else None
        row = _row_that_gives(node, wanted, graph, tp) if wanted is not None else None
        if row is not None:
            found[node] = row
    return found


def made_of_tensors(graph: fx.Graph) -> set[fx.Node]:
    """What is computed from tensors of the network alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = [n for n in node.all_input_nodes if is_tensor(n)]  # a size may depend on the batch's
        computed = node.op in ("call_function", "call_method") and inputs and is_tensor(node)
        if computed and all(n in found or is_tensor_read(n) for n in inputs):
            found.add(node)
    return found


def _wanted(node: fx.Node, rows: Mapping[fx.Node, Row]) -> Sharded | None:
    """The one sharding that all readers need."""
    spreads: set[Spread] = set()
    for user in node.users:
        spreads.add(dict(zip(user.all_input_nodes, rows.get(user, replicate(user)).inputs))[node])
    spread = spreads.pop() if len(spreads) == 1 else None
    return spread if isinstance(spread, Sharded) else None


def _row_that_gives(node: fx.Node, wanted: Sharded, graph: SpikeGraph, tp: int) -> Row | None:
    """The row by which the result lies as wanted, tried with each dim of each operand that is long enough."""
    size = shape(node)[wanted.dim]
    for source in filter(is_tensor, node.all_input_nodes):
        for dim, extent in enumerate(shape(source)):
            if extent != size:
                continue
            try:
                row = follow(node, Ask(graph, tp, {source: Sharded(dim, wanted.pieces)}))
            except Declined:
                continue
            if row.output == wanted:
                return row
    return None
