"""What a stage holds while it runs, from the life of each value in its graph: forward, backward, and in between.

Forward goes through the operations in order: a value lives until its last reader has run, or until backward if an
operation keeps it. Backward goes back: the gradient of a value lives from its last reader to its maker, what an
operation kept is free when all that kept it are done. A layer that is kept whole needs what it was seen to need
(`LeafMemory`). Views share the memory of their source. Sizes are those of the whole example batch; what libraries take
inside a kernel is not in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from snnpart import facts
from snnpart.facts import Cost, Value
from snnpart.graph import output_node
from snnpart.ops_time import Loop
from snnpart.passes.analyze.cost import kept_values, memory_of_leaf, own_saved, result_bytes, storage
from snnpart.passes.analyze.kinds import first_value
from snnpart.passes.lower.cut_stages import StageGraph


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one pass over the example batch. `saved`: from forward to backward, what is received and sent included.
    The others are the most beyond that: in forward, in backward (the gradients of parameters apart), and in its first
    half. `gates`: gradients kept from the first half of backward for the second."""

    saved: float
    forward: float
    backward: float
    inputs: float
    gates: float


def stage_memory(cut: StageGraph) -> StageMemory:
    """What a stage holds."""
    lives = _Lives.of(cut)
    saved = lives.saved()
    forward = max(lives.forward(), default=0.0) - saved
    backward = max(lives.backward(frees=True), default=0.0)
    inputs = max(lives.backward(frees=False), default=0.0)
    return StageMemory(
        saved, max(forward, 0.0), max(backward, 0.0), max(inputs, 0.0), lives.gates() * bool(cut.receives)
    )


@dataclass(frozen=True)
class _Lives:
    """`pinned`: memory that lives from a microbatch's forward to the end of its backward. `outside`: memory that is not
    the stage's. `keepers`: who keeps a value for backward; `own`: bytes that an operation makes for backward alone."""

    nodes: tuple[fx.Node, ...]
    pinned: frozenset[fx.Node]
    outside: frozenset[fx.Node]
    outputs: tuple[fx.Node, ...]
    keepers: Mapping[fx.Node, list[fx.Node]]
    own: Mapping[fx.Node, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cut: StageGraph) -> _Lives:
        received = {port.name for port in cut.receives}
        placeholders = [node for node in cut.graph.nodes if node.op == "placeholder"]
        outputs = tuple(storage(node) for node in output_node(cut.graph).all_input_nodes)
        keepers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        own: dict[fx.Node, float] = {}
        for node in cut.graph.nodes:
            cost, value = facts.get(node, Cost), first_value(node)
            if cost is not None and value is not None and cost.backward_us:
                inside = isinstance(node.target, Loop)
                own[node] = cost.saved if inside else own_saved(node, value)
                for item in () if inside else kept_values(node):
                    keepers[item].append(node)
        return cls(
            tuple(cut.graph.nodes),
            frozenset({node for node in placeholders if node.name in received} | ({*outputs} if cut.sends else set())),
            frozenset(node for node in placeholders if node.name not in received),
            outputs,
            keepers,
            own,
        )

    def saved(self) -> float:
        """Bytes from forward to backward, each memory once."""
        kept = ({*self.keepers} | self.pinned) - self.outside
        return sum(self.own.values()) + sum(map(result_bytes, kept))

    def gates(self) -> float:
        """Gradients that arrive where a parameter is read beside a value that has a gradient."""
        return sum(result_bytes(node) for node in self.nodes if _reads_parameters(node) and _learns(node))

    def forward(self) -> Iterator[float]:
        """Bytes that live while each operation runs; the states of neurons until the microbatch has gone through."""
        last = {storage(item): node for node in self.nodes for item in (node, *node.all_input_nodes)}
        ends: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for item, node in last.items():
            if item not in self.keepers and item not in self.pinned:
                ends[node].append(item)
        live = 0.0
        for node in self.nodes:
            live += self.own.get(node, 0.0) + self._made(node) + _state(node)
            yield live + _working(node, forward=True)
            live -= sum(self._made(item) for item in ends[node])

    def _made(self, node: fx.Node) -> float:
        """Bytes of the memory that a node makes."""
        other = node in self.outside or node.op in ("get_attr", "output") or storage(node) is not node
        return 0.0 if other else result_bytes(node)

    def backward(self, frees: bool) -> Iterator[float]:
        """Bytes beyond what was saved, while each operation runs; the second half of backward comes later where what
        was saved stays (`frees` False), and keeps gradients."""
        free = defaultdict(list)
        for item, keepers in self.keepers.items():
            if item not in self.pinned and item not in self.outside:
                free[keepers[0]].append(item)
        grads = {item: result_bytes(item) for item in self.outputs if _learns(item)}
        live = sum(grads.values())
        for node in reversed(self.nodes):
            arriving = grads.pop(node, 0.0)
            if _learns(node) and storage(node) is node:
                made = self._gradients(node, grads, arriving)
                yield live + made + _working(node, forward=False)
                live += made - arriving
            if frees:
                live -= self.own.get(node, 0.0) + sum(map(result_bytes, free[node]))
            elif _reads_parameters(node) and _learns(node):
                live += arriving

    def _gradients(self, node: fx.Node, grads: dict[fx.Node, float], arriving: float) -> float:
        """Bytes of the gradients that a node hands on; one that comes second is added to the first."""
        made = 0.0
        for item in {storage(item) for item in node.all_input_nodes}:
            if item.op == "get_attr" or item in self.outside or not _learns(item):
                continue
            size = result_bytes(item)
            made += size if item not in grads else 0.0
            grads[item] = size
        return made


def _learns(node: fx.Node) -> bool:
    value = first_value(node)
    return value is not None and value.requires_grad


def _reads_parameters(node: fx.Node) -> bool:
    return any(item.op == "get_attr" and _learns(item) for item in node.all_input_nodes)


def _state(node: fx.Node) -> float:
    value = facts.get(node, Value)
    return memory_of_leaf(node).state * value.bytes if node.op == "call_module" and value is not None else 0.0


def _working(node: fx.Node, forward: bool) -> float:
    """Bytes that an operation needs while it runs."""
    value = facts.get(node, Value)
    if node.op != "call_module" or value is None:
        return 0.0
    memory = memory_of_leaf(node)
    return (memory.forward if forward else memory.backward) * value.bytes
