"""analyze-repeats: which modules are repetitions of one block, as `layer1.0` and `layer1.1` of a residual network.

Two modules are equal when the nodes made under them are: same operations, literals, shapes and dtypes, the same wiring
inside, and values from outside at the same places. A module's nodes are described as text relative to the module (inner
nodes by position, outer ones by order of first use) and hashed; a node is described once for each module it lies in, so
the work is nodes times depth. Where equal modules nest, the outermost count.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.facts import Block, Value
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import kinds

_SMALLEST = 2
"""A block has at least this many submodules: single layers that happen to be equal are no blocks."""


@dataclass(frozen=True)
class AnalyzeRepeats:
    """Writes `Block` on the nodes of repeated modules."""

    name: ClassVar[str] = "analyze-repeats"
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = (Block,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        modules = _describe(graph)
        equal: defaultdict[str, list[_Module]] = defaultdict(list)
        for module in modules.values():
            if len(module.children) >= _SMALLEST:
                equal[module.digest.hexdigest()].append(module)
        repeated = [members for members in equal.values() if len(members) > 1]
        taken: set[fx.Node] = set()
        for members in sorted(repeated, key=lambda members: -len(members[0].nodes)):
            if not any(module.nodes[0] in taken for module in members):
                _mark(members, taken)


@dataclass
class _Module:
    """The nodes made under one module path and the running hash of their description."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)
    names: dict[fx.Node, str] = field(default_factory=dict)
    children: set[str] = field(default_factory=set)
    digest: Any = field(default_factory=hashlib.blake2s)

    def add(self, node: fx.Node, child: str) -> None:
        """Describe the next node; `child` is the submodule it lies in (empty: in none)."""
        self.digest.update(f"{self._text(node)}\n".encode())
        self.names[node] = str(len(self.nodes))
        self.nodes.append(node)
        if child:
            self.children.add(child)

    def _text(self, node: fx.Node) -> str:
        target: Any = node.target
        if node.op in ("get_attr", "call_module"):
            target = str(target)[len(self.path) :] if str(target).startswith(self.path) else "outside"
        elif not isinstance(target, str):
            target = f"{target.__module__}.{kinds.name_of(node) or target}"
        value = kinds.first_value(node)
        shape = (value.shape, value.dtype, value.slopes) if value is not None else None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._name)
        return f"{node.op} {target} {args} {kwargs} {shape}"

    def _name(self, node: fx.Node) -> str:
        return self.names.setdefault(node, f"outer{len(self.names) - len(self.nodes)}")


def _describe(graph: SpikeGraph) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for node in graph.graph.nodes:
        for path, child in _prefixes(_path(node)):
            if path not in modules:
                modules[path] = _Module(path)
            modules[path].add(node, child)
    return modules


def _path(node: fx.Node) -> str:
    """The module that a node was made in; that of the owner for a tensor."""
    if node.op == "get_attr":
        return str(node.target).rpartition(".")[0]
    if node.op == "call_module":
        return str(node.target)
    return facts.origin(node).module if node.op.startswith("call") else ""


def _prefixes(path: str) -> Iterator[tuple[str, str]]:
    """Each module above a path, the path itself included, and the next step from there."""
    atoms = path.split(".") if path else []
    for depth in range(1, len(atoms) + 1):
        yield ".".join(atoms[:depth]), atoms[depth] if depth < len(atoms) else ""


def _mark(members: list[_Module], taken: set[fx.Node]) -> None:
    name = members[0].path
    for index, module in enumerate(members):
        for position, node in enumerate(module.nodes):
            facts.put(node, Block(name, index, position))
        taken.update(module.nodes)
