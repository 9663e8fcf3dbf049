"""At which step of the time loop every node runs.

A layer that is called T times is called at steps 0, 1, ... What follows from its results belongs to the latest step
among its operands, and what only one step reads (`x[:, t]`, the first state) to that step.

The first values of a loop may be made by the lines that it goes on with (`w = b * w + a * u`, of which each step reads
what the step before left): what step 0 has one more of than step 1 is then from before the loop
(`Steps.without_first_values`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import fx

from snnpart import facts, ops
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import kinds, loops

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

    def without_first_values(self) -> Steps:
        """The same steps without what step 0 does more often than step 1: the first of each such operation."""
        first, second = (Counter[Hashable](key_of(node) for node in nodes) for nodes in self.nodes()[:2])
        spare = first - second
        of: dict[fx.Node, int] = {}
        for node, step in self.of.items():
            key = key_of(node)
            if step == 0 and key in second and spare[key] > 0:
                spare[key] -= 1
            else:
                of[node] = step
        return Steps(self.count, of)


def key_of(node: fx.Node) -> Hashable:
    """What the same operation at another step has too."""
    origin = facts.origin(node)
    return node.op, node.target, origin.module, origin.file, origin.line


def find(graph: SpikeGraph, *, early: bool = False) -> Steps | None:
    """The steps of the graph's time loop; None when there is no loop of two steps or more. `early`: as in `loops`."""
    if _takes_all_steps(graph):
        return None
    loop = loops.find(graph, early=early)
    count = loop.length
    if count < 2 or not loop.groups:
        return None
    seeds = loops.seeds(loop.groups, count)
    of = _forward(graph, seeds)
    _backward(graph, of)
    for node in graph.graph.nodes:
        if node in of and any(of.get(source, -1) > of[node] for source in node.all_input_nodes):
            del of[node]  # a call that reads what a later one reads first: the calls are not in the order of time
    return Steps(count, {node: of[node] for node in graph.graph.nodes if node in of})


def _forward(graph: SpikeGraph, seeds: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The latest step among a node's operands, for those that do not gather all steps."""
    of: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        made = [of[source] for source in node.all_input_nodes if source in of]
        gathers = len(set(made)) > 1 and (kinds.kind_of(node) == "join" or node.target is ops.index_assign)
        if node in seeds:
            of[node] = seeds[node]
        elif made and not gathers and node.op in _COMPUTES:
            of[node] = max(made)
    return of


def _backward(graph: SpikeGraph, of: dict[fx.Node, int]) -> None:
    for node in reversed(graph.graph.nodes):
        if node not in of and node.op in _COMPUTES and node.users:
            steps = {of.get(user) for user in node.users}
            step = steps.pop()
            if step is not None and not steps:
                of[node] = step


def _takes_all_steps(graph: SpikeGraph) -> bool:
    """Whether a neuron layer already takes all steps in one call."""
    return any(adapter_for(leaf.module).time_dim(leaf.module) is not None for leaf in graph.leaves.values())
