"""What a stage holds while it runs, from the life of each value in its graph: forward, backward, and in between.

Forward goes through the operations in order: a value lives until its last reader has run, or until backward if an
operation keeps it. Backward goes back: the gradient of a value lives from its last reader to its maker, what an
operation kept is free when all that kept it are done. A layer that is kept whole needs what it was seen to need
(`LeafMemory`). Views share the memory of their source. What libraries take inside a kernel is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from snnpart import facts
from snnpart.facts import Cost, LeafMemory
from snnpart.graph import output_node
from snnpart.ops_time import Loop
from snnpart.passes.analyze.cost import kept_values, memory_of_leaf, own_saved, result_bytes, storage
from snnpart.passes.analyze.kinds import first_value, kind_of
from snnpart.passes.lower.cut_stages import StageGraph


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a pass over one microbatch. `saved`: from forward to backward, what is received and sent included. The
    others are the most beyond that: in forward, in the first backward of a step, which makes the gradients of
    parameters, in others, which add to them, and in the first half of a backward. `gates`: gradients kept from the
    first half for the second."""

    saved: float
    forward: float
    first_backward: float
    backward: float
    inputs: float
    gates: float


def stage_memory(cut: StageGraph, part: float) -> StageMemory:
    """What a stage holds for a microbatch of this share of the example batch."""
    lives = _Lives.of(cut, part)
    saved = lives.saved()
    most = max(lives.forward(), default=0.0)
    return StageMemory(
        saved=saved,
        forward=max(most - saved, 0.0),
        first_backward=max(lives.backward("first"), default=0.0),
        backward=max(lives.backward("adds"), default=0.0),
        inputs=max(lives.backward("inputs"), default=0.0),
        gates=lives.gates() if cut.receives else 0.0,
    )


@dataclass(frozen=True)
class _Lives:
    """`pinned`: memory that lives from a microbatch's forward to the end of its backward. `outside`: memory that is not
    the stage's. `keepers`: who keeps a value for backward; `own`: bytes that an operation makes for backward alone.
    `part`: the share of the example batch."""

    nodes: tuple[fx.Node, ...]
    pinned: frozenset[fx.Node]
    outside: frozenset[fx.Node]
    outputs: tuple[fx.Node, ...]
    keepers: Mapping[fx.Node, list[fx.Node]]
    own: Mapping[fx.Node, float]
    part: float

    @classmethod
    def of(cls, cut: StageGraph, part: float) -> _Lives:
        received = {port.name for port in cut.receives}
        placeholders = [node for node in cut.graph.nodes if node.op == "placeholder"]
        outputs = tuple(storage(node) for node in output_node(cut.graph).all_input_nodes)
        keepers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        own: dict[fx.Node, float] = {}
        for node in cut.graph.nodes:
            cost, value = facts.get(node, Cost), first_value(node)
            if cost is not None and value is not None and cost.backward_us:
                inside = isinstance(node.target, Loop)
                own[node] = part * (cost.saved if inside else own_saved(node, value))
                for item in () if inside else kept_values(node):
                    keepers[item].append(node)
        return cls(
            tuple(cut.graph.nodes),
            frozenset({node for node in placeholders if node.name in received} | ({*outputs} if cut.sends else set())),
            frozenset(node for node in placeholders if node.name not in received),
            outputs,
            keepers,
            own,
            part,
        )

    def _bytes(self, node: fx.Node) -> float:
        return self.part * result_bytes(node)

    def saved(self) -> float:
        """Bytes from forward to backward, each memory once."""
        kept = ({*self.keepers} | self.pinned) - self.outside
        return sum(self.own.values()) + sum(map(self._bytes, kept))

    def gates(self) -> float:
        """Gradients that arrive where a parameter is read beside a value that has a gradient."""
        return sum(self._bytes(node) for node in self.nodes if _parameters(node) and _learns(node))

    def forward(self) -> Iterator[float]:
        """Bytes that live while each operation runs; the states of neurons until the microbatch has gone through."""
        last = {storage(item): node for node in self.nodes for item in (node, *node.all_input_nodes)}
        ends: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for item, node in last.items():
            if item not in self.keepers and item not in self.pinned:
                ends[node].append(item)
        live = 0.0
        for node in self.nodes:
            leaf = _needs(node)
            live += self.own.get(node, 0.0) + self._made(node) + leaf.state * self._bytes(node)
            yield live + leaf.forward * self._bytes(node)
            live -= sum(self._made(item) for item in ends[node])

    def _made(self, node: fx.Node) -> float:
        """Bytes of the memory that a node makes."""
        other = node in self.outside or node.op in ("get_attr", "output") or storage(node) is not node
        return 0.0 if other else self._bytes(node)

    def backward(self, way: Literal["first", "adds", "inputs"]) -> Iterator[float]:
        """Bytes beyond what was saved, while each operation runs. In the first half ("inputs") what was saved stays,
        and so do the gradients that the second half begins with."""
        free: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for item, keepers in self.keepers.items():
            if item not in self.pinned and item not in self.outside:
                free[keepers[0]].append(item)
        grads = {item: self._bytes(item) for item in self.outputs if _learns(item)}
        live = sum(grads.values())
        for node in reversed(self.nodes):
            arriving = grads.pop(node, 0.0)
            if _learns(node) and storage(node) is node:
                made, added = self._gradients(node, grads)
                weights = 0.0 if way == "inputs" else sum(map(result_bytes, _parameters(node)))
                yield live + made + added + weights + _needs(node).backward * self._bytes(node)
                live += made - arriving + (weights if way == "first" else 0.0)
            if way != "inputs":
                live -= self.own.get(node, 0.0) + sum(map(self._bytes, free[node]))
            elif _parameters(node) and _learns(node):
                live += arriving

    def _gradients(self, node: fx.Node, grads: dict[fx.Node, float]) -> tuple[float, float]:
        """Bytes of the gradients that a node hands on, and of those that are only added to one that is there."""
        made = added = 0.0
        for item in {storage(item) for item in node.all_input_nodes}:
            if item.op != "get_attr" and item not in self.outside and _learns(item):
                made += 0.0 if item in grads else self._bytes(item)
                added += self._bytes(item) if item in grads else 0.0
                grads[item] = self._bytes(item)
        return made, added


def _learns(node: fx.Node) -> bool:
    value = first_value(node)
    return value is not None and value.requires_grad


def _parameters(node: fx.Node) -> list[fx.Node]:
    return [item for item in node.all_input_nodes if item.op == "get_attr" and _learns(item)]


def _needs(node: fx.Node) -> LeafMemory:
    """What a layer that is kept whole needs, and a surrogate, whose derivative is made beside what it is multiplied
    with; nothing for another operation."""
    if node.op == "call_module":
        return memory_of_leaf(node)
    return LeafMemory(own=0.0, backward=float(kind_of(node) == "surrogate"))
