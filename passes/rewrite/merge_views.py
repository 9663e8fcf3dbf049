"""merge-views: equal views of one value become one node.

A layer that takes [T, N, ...] flattens T and N for itself, so that two layers which read one value read two views of
it. As one node the value is gathered once for both, and its gradient is summed once. Only operations that move no data
are merged; the first of them stands for all. Gradients of the two readers are summed before the view, not behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze.kinds import VIEWS, name_of

_NOT = frozenset({"getitem", "unbind", "split", "chunk"})


@dataclass(frozen=True)
class MergeViews:
    """Replaces later equal views by the first."""

    name: ClassVar[str] = "merge-views"
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "reassociates"

    def run(self, graph: SpikeGraph) -> None:
        first: dict[Any, fx.Node] = {}
        for node in list(graph.graph.nodes):
            if not _mergeable(node):
                continue
            key = (node.op, node.target, repr(node.args), repr(sorted(node.kwargs.items())))
            kept = first.setdefault(key, node)
            if kept is not node and facts.get(kept, Value) == facts.get(node, Value):
                node.replace_all_uses_with(kept)
                graph.graph.erase_node(node)


def _mergeable(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or facts.get(node, Value) is None:
        return False
    name = name_of(node)
    return name in VIEWS and name not in _NOT
