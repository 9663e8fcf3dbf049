"""analyze-time: where time is in every value.

Three answers come together in `TimeRole`: the dim that carries T (`axes`), the step of an unrolled loop at which the
value is made (`loops`), and whether the value differs from step to step. What is computed from static inputs and
weights alone does not vary; what a neuron layer, a random draw or an input with a time axis gives does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from snnpart import effects, facts, ops_time
from snnpart.facts import TimeRole, Value
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import axes, kinds, loops
from snnpart.passes.analyze.axes import Axes
from snnpart.passes.analyze.loops import Loop


@dataclass(frozen=True)
class AnalyzeTime:
    """Writes `TimeRole` on every node that makes a tensor."""

    name: ClassVar[str] = "analyze-time"
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = (TimeRole,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        loop = loops.find(graph)
        found = axes.find(graph, loop.steps)
        varies = _varying(graph, loop, found)
        for node in _values(graph):
            axis = found.get(node)
            dim, merged = (axis.dim, axis.merged) if axis is not None else (None, False)
            facts.put(node, TimeRole(dim, merged, loop.steps.get(node), node in varies))


def _values(graph: SpikeGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op != "output" and kinds.first_value(node) is not None]


def _varying(graph: SpikeGraph, loop: Loop, found: Axes) -> set[fx.Node]:
    """The values that differ from step to step.

    Of the nodes that do the same work at successive steps all vary when one does: the first step of a hand-written
    neuron starts from a constant, yet its spikes are not those of the second.
    """
    varies: set[fx.Node] = set()
    _spread(graph, loop, found, varies)
    alike = {node for nodes in loop.groups if any(node in varies for node in nodes) for node in nodes}
    if not alike <= varies:
        varies |= alike
        _spread(graph, loop, found, varies)
    return varies


def _spread(graph: SpikeGraph, loop: Loop, found: Axes, varies: set[fx.Node]) -> None:
    for node in _values(graph):
        if node not in varies and (_carries(node, loop) or _varies(node, found, varies)):
            varies.add(node)


def _carries(node: fx.Node, loop: Loop) -> bool:
    """The node takes a value over from an earlier step."""
    step = loop.steps.get(node)
    return step is not None and any(loop.steps.get(source, step) < step for source in kinds.tensor_inputs(node))


def _varies(node: fx.Node, found: Axes, varies: set[fx.Node]) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return node in found
    if node.op == "call_module" or isinstance(node.target, ops_time.Loop):
        return True
    if effects.is_random(node) and not _switched_off(node):
        return True
    sources = set(kinds.tensor_inputs(node))
    if kinds.name_of(node) == "stack" and node in found and found[node].dim == kinds.argument(node, 1, "dim", 0):
        return len(sources) > 1 or bool(sources & varies)
    gone = node not in found and any(source in found for source in sources)
    return bool(sources & varies) and not (gone and kinds.kind_of(node) == "reduction")


def _switched_off(node: fx.Node) -> bool:
    return "dropout" in kinds.name_of(node) and kinds.argument(node, 1, "p") == 0
