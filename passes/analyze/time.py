"""analyze-time: where time is in every value.

Three answers come together in `TimeRole`: the dim that carries T (`axes`), the step of an unrolled loop at which the
value is made (`loops`), and whether the value differs from step to step. What is computed from static inputs and
weights alone does not vary; what a neuron layer, a random draw or an input with a time axis gives does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from snnpart import effects, facts
from snnpart.facts import TimeRole, Value
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import axes, kinds, loops
from snnpart.passes.analyze.axes import Axes


@dataclass(frozen=True)
class AnalyzeTime:
    """Writes `TimeRole` on every node that makes a tensor."""

    name: ClassVar[str] = "analyze-time"
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = (TimeRole,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        steps = loops.find(graph)
        found = axes.find(graph, steps)
        varies: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if kinds.first_value(node) is None or node.op == "output":
                continue
            if _varies(node, graph, found, varies):
                varies.add(node)
            axis = found.get(node)
            dim, merged = (axis.dim, axis.merged) if axis is not None else (None, False)
            facts.put(node, TimeRole(dim, merged, steps.get(node), node in varies))


def _varies(node: fx.Node, graph: SpikeGraph, found: Axes, varies: set[fx.Node]) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return node in found
    if node.op == "call_module" or (effects.is_random(node) and not _switched_off(node)):
        return True
    if kinds.name_of(node) == "stack" and node in found and found[node].dim == kinds.argument(node, 1, "dim", 0):
        sources = set(kinds.tensor_inputs(node))
        return len(sources) > 1 or bool(sources & varies)
    if node not in found and any(source in found for source in kinds.tensor_inputs(node)):
        return _reads_step(node) and any(source in varies for source in kinds.tensor_inputs(node))
    return any(source in varies for source in kinds.tensor_inputs(node))


def _switched_off(node: fx.Node) -> bool:
    return "dropout" in kinds.name_of(node) and kinds.argument(node, 1, "p") == 0


def _reads_step(node: fx.Node) -> bool:
    """Indexing takes one step out of the axis; a reduction over it leaves one value for all steps."""
    return kinds.kind_of(node) != "reduction"
