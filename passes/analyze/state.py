"""analyze-state: which calls belong to which neuron layer, in order.

A layer keeps its state between its calls, so call k of a layer comes after call k-1 whatever the data flow says. A loop
that calls a layer at every step counts as one call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.facts import State
from snnpart.graph import SpikeGraph
from snnpart.ops_time import leaf_paths


@dataclass(frozen=True)
class AnalyzeState:
    """Writes `State` on every call of a neuron layer."""

    name: ClassVar[str] = "analyze-state"
    reads: ClassVar[tuple[type, ...]] = ()
    writes: ClassVar[tuple[type, ...]] = (State,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        calls: defaultdict[str, list[fx.Node]] = defaultdict(list)
        for node in graph.graph.nodes:
            for path in leaf_paths(node):
                if graph.leaves[path].neuron:
                    calls[path].append(node)
        for module, nodes in calls.items():
            for call, node in enumerate(nodes):
                facts.put(node, State(module, call, len(nodes)))
