"""hoist-invariant: what is the same at every step is computed once, and repeated where time first matters.

Networks that take all steps in one call repeat a static image T times, and their first convolution, BatchNorm and
pooling then compute the same thing T times over. This pass follows each repeated value (`starts`) through the
operations that treat every copy alike (`rules`), computes those on one copy, and repeats the result where an operation
needs the copies: a neuron layer, or an operand that differs from step to step.

A repeated value is known by its form (`copies`), not by its time role: whichever dim repeats, an operation that works
on each index of that dim by itself gives equal results. So the pass needs no analysis, and a user's own [T, N, ...]
input, which may differ at every step, has nothing to hoist.

Outputs and gradients are those of the original up to the order of sums (backward adds up the T copies before the
convolution instead of inside it). BatchNorm's running variance counts the copies (`ops.batch_norm_copies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.graph import SpikeGraph
from snnpart.passes.rewrite.canonicalize import sweep
from snnpart.passes.rewrite.hoist_invariant.copies import MADE_BY, Copies, Emit
from snnpart.passes.rewrite.hoist_invariant.rules import follow
from snnpart.passes.rewrite.hoist_invariant.starts import start


@dataclass(frozen=True)
class HoistInvariant:
    """The pass. It expects a canonicalized graph."""

    name: ClassVar[str] = MADE_BY
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "reassociates"

    def run(self, graph: SpikeGraph) -> None:
        known: dict[fx.Node, Copies] = {}
        for node in list(graph.graph.nodes):
            found = follow(node, known) if any(item in known for item in node.all_input_nodes) else None
            found = found or start(node)
            if found is not None:
                known[node] = found
        _replace(graph.graph, {node: copies for node, copies in known.items() if copies.worked})
        sweep(graph.graph)


def _replace(graph: fx.Graph, hoisted: dict[fx.Node, Copies]) -> None:
    """Give those who need the copies the repeated result, and drop the operations that computed them."""
    for node, copies in hoisted.items():
        outside = [user for user in node.users if user not in hoisted]
        if outside:
            whole = Emit(node).restored(copies)
            if any(user.op == "output" for user in outside):
                whole = Emit(node).call("call_method", "contiguous", (whole,), facts.need(node, Value))
            node.replace_all_uses_with(whole, lambda user: user not in hoisted)
    for node in reversed(hoisted):
        graph.erase_node(node)


__all__ = ["HoistInvariant"]
