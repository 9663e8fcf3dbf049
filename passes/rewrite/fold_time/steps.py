"""At which step of the time loop every node runs.

`loops.find` gives the steps of what follows from repeated layers. Here the nodes before them are added: what only one
step reads (`x[:, t]`, the first state) belongs to that step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import loops

_COMPUTES = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class Steps:
    """`count` steps, and the step of each node that belongs to one."""

    count: int
    of: dict[fx.Node, int]

    def nodes(self) -> list[list[fx.Node]]:
        """The nodes of every step, in graph order."""
        found: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node, step in self.of.items():
            found[step].append(node)
        return found


def find(graph: SpikeGraph) -> Steps | None:
    """The steps of the graph's time loop; None when there is no loop of two steps or more."""
    if _takes_all_steps(graph):
        return None
    of = {node: step for node, step in loops.find(graph).steps.items() if node.op in _COMPUTES}
    if not of:
        return None
    for node in reversed(graph.graph.nodes):
        if node not in of and node.op in _COMPUTES and node.users:
            steps = {of.get(user) for user in node.users}
            step = steps.pop()
            if step is not None and not steps:
                of[node] = step
    count = max(of.values()) + 1
    return Steps(count, {node: of[node] for node in graph.graph.nodes if node in of}) if count > 1 else None


def _takes_all_steps(graph: SpikeGraph) -> bool:
    """Whether a neuron layer already takes all steps in one call."""
    return any(adapter_for(leaf.module).time_dim(leaf.module) is not None for leaf in graph.leaves.values())
