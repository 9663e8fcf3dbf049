"""Parameters that several stages may hold: which they are, who reads which copy, and the copies taken apart.

A parameter that is read at distant places (an embedding and the output layer, a convolution that is used twice) binds
all that lies between to one stage. It need not: each stage holds a copy and the stages sum its gradients once a step.

- the *readers* of a parameter are the operations that need it and more than tensors; what is computed from tensors
  alone (a transposed matrix) belongs to the reader.
- readers with the same *place* read one copy. The place is the latest part with a key (see `parts`) that a reader
  needs, where parameters with several readers are no keys. A layer that a time loop calls at every step waits for the
  same layers each time and so has one place; a layer that is used twice in a step has two.
- a parameter can be copied if everything that its readers compute from tensors alone comes from tensors that can be.
  So can a buffer or constant that nothing writes (a mask that every layer reads), which needs no sum; not a tensor
  inside a leaf, which is the leaf's.

Copies stand in the order of the network. The first goes by the parameter's name, another by its other name in the
module that reads it (`head.weight` of a tied output layer), else by the name and its number (`conv.weight@1`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from snnpart import facts
from snnpart.effects import writes_buffer
from snnpart.facts import Copy, Origin
from snnpart.graph import SpikeGraph, TensorInfo
from snnpart.passes.decide.parts import find_parts, is_tensor_read, weight_only

MADE_BY = "decide-stages"
Index = Mapping[str, Mapping[fx.Node, int]]
"""For each parameter, which copy each of its readers reads."""


@dataclass(frozen=True)
class Copies:
    """The copies of one parameter: what they go by, and which of them each reader reads."""

    keys: tuple[str, ...]
    index: Mapping[fx.Node, int]


def find_copies(graph: SpikeGraph) -> dict[str, Copies]:
    """The parameters that can be copied and whose readers have several places."""
    readers = _can_be_copied(graph)
    if not readers:
        return {}
    places = _places(graph, readers)
    found: dict[str, Copies] = {}
    for name, nodes in readers.items():
        order = sorted({places[node] for node in nodes})
        if len(order) > 1:
            index = {node: order.index(places[node]) for node in nodes}
            found[name] = Copies(_keys(graph.tensors[name], index), index)
    return found


def separate(graph: SpikeGraph, names: Collection[str]) -> None:
    """Give each copy of these parameters a read of its own in the graph, and what is computed from it alone.

    A name of a parameter that has one place in this graph (another number of steps) changes nothing.
    """
    found = {name: copies for name, copies in (find_copies(graph) if names else {}).items() if name in names}
    if found:
        keys = {name: copies.keys for name, copies in found.items()}
        _take_apart(graph.graph, {name: copies.index for name, copies in found.items()}, keys)


def copied_parameters(graph: SpikeGraph) -> tuple[str, ...]:
    """The parameters of which a graph reads several copies."""
    return tuple(sorted({str(node.target) for node in graph.graph.nodes if facts.get(node, Copy) is not None}))


def _can_be_copied(graph: SpikeGraph) -> dict[str, list[fx.Node]]:
    """Parameters with several readers that can be copied, and these in graph order."""
    weights, fixed = weight_only(graph.graph.nodes), {*_written(graph), *graph.tied_leaves()}
    free = graph.tensors.keys() - fixed
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node in weights:
            continue
        for source in (source for source in node.all_input_nodes if source in weights):
            names = _tensors_below(source)
            fixed |= names if node.op == "output" or not names <= free else set()
            for name in names:
                if node not in readers[name]:
                    readers[name].append(node)
    return {name: nodes for name, nodes in readers.items() if len(nodes) > 1 and name not in fixed}


def _written(graph: SpikeGraph) -> set[str]:
    """Buffers that the network changes, or in which neurons keep the state of a window: copies would drift apart."""
    reads = (read for node in graph.graph.nodes if writes_buffer(node) for read in node.all_input_nodes)
    names = {str(read.target) for read in reads if is_tensor_read(read)}
    return {name for name in names if graph.tensors[name].kind != "parameter"} | graph.window_buffers()


def _tensors_below(node: fx.Node) -> set[str]:
    """The tensors that a node which needs nothing else is computed from."""
    if is_tensor_read(node):
        return {str(node.target)}
    return set().union(*(_tensors_below(source) for source in node.all_input_nodes))


def _places(graph: SpikeGraph, readers: Mapping[str, Iterable[fx.Node]]) -> dict[fx.Node, int]:
    """The place of each reader, found on a copy of the graph in which every reader has a read of its own."""
    work = graph.copy()
    twin = dict(zip(graph.graph.nodes, work.graph.nodes, strict=True))
    alone = {name: {twin[node]: i for i, node in enumerate(nodes)} for name, nodes in readers.items()}
    _take_apart(work.graph, alone, {})
    position = {node: part.position for part in find_parts(work, readers).parts for node in part.nodes}
    return {node: position[twin[node]] for nodes in readers.values() for node in nodes}


def _keys(info: TensorInfo, index: Mapping[fx.Node, int]) -> tuple[str, ...]:
    """What the copies go by."""
    keys = [info.name]
    for number in range(1, max(index.values()) + 1):
        modules = {facts.origin(node).module for node, i in index.items() if i == number}
        alias = next((a for a in info.aliases if a.rpartition(".")[0] in modules and a not in keys), None)
        keys.append(alias or f"{info.name}@{number}")
    return tuple(keys)


def _take_apart(graph: fx.Graph, index: Index, keys: Mapping[str, tuple[str, ...]]) -> None:
    """Reads of its own for every copy but the first of each parameter."""
    maker = _Maker(graph, index, keys)
    numbers: dict[fx.Node, None] = dict.fromkeys(node for of in index.values() for node in of)
    for reader in [node for node in graph.nodes if node in numbers]:
        for source in reader.all_input_nodes:
            if source in maker.weights:
                reader.replace_input_with(source, maker.copy(source, reader))
    for node in reversed([node for node in graph.nodes if node in maker.weights]):
        if not node.users:
            graph.erase_node(node)


@dataclass
class _Maker:
    """Makes the reads of copies, and what is computed from them, in front of the first reader."""

    graph: fx.Graph
    index: Index
    keys: Mapping[str, tuple[str, ...]]
    weights: set[fx.Node] = field(init=False)
    made: dict[tuple[fx.Node, frozenset[tuple[str, int]]], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = weight_only(self.graph.nodes)

    def copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node as this reader needs it."""
        numbers = {name: self.index[name][reader] for name in _tensors_below(node) if name in self.index}
        key = (node, frozenset(numbers.items()))
        if not any(numbers.values()):
            return node
        if key not in self.made:
            sources = {source: self.copy(source, reader) for source in node.all_input_nodes}
            with self.graph.inserting_before(reader):
                self.made[key] = new = self.graph.node_copy(node, sources.__getitem__)
            at = facts.origin(reader)
            facts.put(new, Origin(at.module, at.file, at.line, MADE_BY))
            if is_tensor_read(node) and self.keys:
                name = str(node.target)
                facts.put(new, Copy(self.keys[name][numbers[name]]))
        return self.made[key]
