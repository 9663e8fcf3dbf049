"""SpikeGraph: a spiking network as an fx graph, with the tensors, neuron layers and promises that go with it.

Form of the graph, checked by `verify`:

- placeholders first: one per tensor input, named after the argument; then, only if a size depends on the batch, the
  integer placeholder `batch_size`.
- `get_attr` reads one tensor of `tensors` by its name (`layer1.0.conv1.weight`), or the flag `training`.
- `call_module` calls one leaf of `leaves` by its path: a neuron layer of a framework, or a module that stays whole.
- everything else is `call_function` on a torch function or one of `snnpart.ops`, `ops_norm` and `ops_time`, or
  `call_method` on a tensor method. The graphs inside an `ops_time.Loop` have this form too, but read no tensors: they
  are given them.
- nothing is written in place: the tracer makes in-place writes functional. Buffers change only through
  `ops.batch_norm` and `ops.assign`.
- `output` holds one flat tuple of nodes; `out_spec` says how the user's structure is built from it.

Every node has an `Origin`; every node that makes a tensor has a `Value`, a node with several results has `Values`.

The tensors and leaves are the user's own objects, only read. Who runs the graph makes copies first (`Body`).
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from snnpart.guards import compares
from snnpart.ops_time import Loop, Nested

TRAINING = "training"
BATCH_SIZE = "batch_size"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor the network owns. `name` is the user's: a `state_dict` key, or the attribute path of a tensor that is
    neither parameter nor buffer (`cell.p.tau`), which `registered=False` marks. `plain`: the aliases that are such
    paths."""

    name: str
    kind: Literal["parameter", "buffer", "constant"]
    tensor: Tensor
    persistent: bool = True
    registered: bool = True
    aliases: tuple[str, ...] = ()
    leaf: str | None = None
    used: bool = True
    plain: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor, its own first."""
        return (self.name, *self.aliases)

    @property
    def keys(self) -> tuple[str, ...]:
        """Its keys in a `state_dict()`: all names where no module registers it, else those that are registered."""
        return tuple(name for name in self.names if name not in self.plain) if self.registered else self.names


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A module that stays whole in the graph: its path, the user's module, and the adapter that knows it."""

    path: str
    module: nn.Module
    framework: str
    neuron: bool


@dataclass(frozen=True, slots=True)
class InputInfo:
    """A tensor input: its placeholder's name and where batch and time lie (None: nowhere)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    time_dim: int | None = None


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """A tensor output, in the order of the graph's output tuple, and its batch dim (None: no batch)."""

    name: str
    batch_dim: int | None


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the trace took as fixed, for the report: kind (`branch`, `constant`, `batch`, ...), text, place."""

    kind: str
    text: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class BatchGuard:
    """A comparison of the batch size N in the user's code (`guards`), and the answer that the graph holds for."""

    text: str
    holds: bool
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} is {self.holds}"

    def at(self, batch: int) -> bool:
        """Whether the code goes the same way at this batch size."""
        return compares(self.text, batch) is self.holds


@dataclass(frozen=True, slots=True)
class StateSlot:
    """State that a traced-through module keeps on itself: attribute `name` of `module`, and its value after reset."""

    module: str
    name: str
    initial: str


@dataclass(kw_only=True)
class SpikeGraph:
    """A network on its way through the passes. Mutable: rewrites change `graph` in place.

    `training_specialised` is True when the graph holds only for the mode `traced_training` (the user's code branches
    on `self.training`). `batch` is the example batch size; `batch_fixed` gives the reason when no other size works.
    `kept`: so many of the last outputs, hand-written state for the next call, stay on the stage that makes them.
    """

    name: str
    graph: fx.Graph
    tensors: dict[str, TensorInfo]
    leaves: dict[str, LeafInfo]
    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    out_constants: dict[int, Any] = field(default_factory=dict)
    batch: int = 1
    batch_fixed: str = ""
    time_steps: int | None = None
    kept: int = 0
    traced_training: bool = True
    training_specialised: bool = False
    states: tuple[StateSlot, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    guards: tuple[BatchGuard, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    def window_buffers(self) -> frozenset[str]:
        """Registered buffers in which hand-written neurons keep the state of one window; nothing writes them back."""
        names = (f"{slot.module}.{slot.name}".strip(".") for slot in self.states)
        return frozenset(name for name in names if name in self.tensors and self.tensors[name].kind == "buffer")

    def answers(self) -> SpikeGraph:
        """The same network with the outputs that are not kept, in their structure."""
        if not self.kept:
            return self
        result, _ = pytree.tree_unflatten(range(self.out_spec.num_leaves), self.out_spec)
        leaves, spec = pytree.tree_flatten(result)
        constants = {i: value for i, value in self.out_constants.items() if i < len(leaves)}
        return replace(self, outputs=self.outputs[: -self.kept], out_spec=spec, out_constants=constants, kept=0)

    def misfit(self, batch: int) -> str:
        """Why the graph does not hold for this batch size; "" when it does."""
        guard = self.broken_at(batch)
        if guard is not None:
            return f"{guard.place} compares {guard.text}"
        return self.batch_fixed if batch != self.batch else ""

    def broken_at(self, batch: int) -> BatchGuard | None:
        """A comparison that comes out otherwise at this batch size than the graph takes it; None when it holds."""
        return next((guard for guard in self.guards if not guard.at(batch)), None)

    def tied_leaves(self) -> dict[str, str]:
        """Leaf path, or name of a leaf's tensor -> the first leaf that shares a tensor with it, where that is another.

        What is tied so must be cut alike and stay on one stage.
        """
        tied: dict[str, str] = {}
        order = {path: place for place, path in enumerate(self.leaves)}
        for name, info in self.tensors.items():
            holders = sorted((path for path, _ in self._holders(info)), key=order.__getitem__)
            if holders:
                first = tied.get(holders[0], holders[0])
                tied |= dict.fromkeys((name, *holders[1:]), first)
        return tied

    def in_leaves(self) -> dict[str, dict[str, str]]:
        """By leaf that holds tensors: their names, and how each is called in the leaf."""
        found: dict[str, dict[str, str]] = {}
        for name, info in self.tensors.items():
            for leaf, own in self._holders(info):
                found.setdefault(leaf, {}).setdefault(name, own)
        return found

    def _holders(self, info: TensorInfo) -> Iterator[tuple[str, str]]:
        """The leaves that a tensor's names lie in, and the rest of each name."""
        for name in info.names:
            parts = name.split(".")
            for at in range(1, len(parts)):
                if (leaf := ".".join(parts[:at])) in self.leaves:
                    yield leaf, ".".join(parts[at:])

    def copy(self) -> SpikeGraph:
        """The same network with a graph of its own; tensors and leaves are shared."""
        return _replace_graph(self, copied(self.graph))


def _replace_graph(source: SpikeGraph, graph: fx.Graph) -> SpikeGraph:
    return replace(
        source, graph=graph, tensors=dict(source.tensors), leaves=dict(source.leaves), notes=dict(source.notes)
    )


def copied(source: fx.Graph) -> fx.Graph:
    """The graph again, with its facts."""
    graph = fx.Graph()
    out = graph.graph_copy(source, {})
    if out is not None:
        graph.output(out).meta = dict(output_node(source).meta)
    return graph


_numbers = itertools.count()


def _with_source(source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function `forward` of some code, whose lines can be looked up as long as it lives: tracebacks show them, and
    torch.compile takes functions without any for one and the same (torch 2.11), of which it keeps eight variants."""
    name = f"<snnpart {next(_numbers)}>"
    exec(compile(source, name, "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    weakref.finalize(function, linecache.cache.pop, name, None)
    return function


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


class Body(nn.Module):
    """Parameters, buffers and leaf modules under the user's dotted names, and the functions of graphs over them.

    Containers are made where the names need them, so that `named_parameters()` gives the user's names. The body owns
    whatever it is given: hand it copies.
    """

    def __init__(self, tensors: Mapping[str, tuple[str, Tensor]], leaves: Mapping[str, nn.Module]) -> None:
        """`tensors`: name -> (kind, tensor) as in `TensorInfo.kind`; those inside a leaf are left out."""
        super().__init__()
        for path, leaf in leaves.items():
            container, name = self._container(path)
            container.add_module(name, leaf)
        for dotted, (kind, tensor) in tensors.items():
            self.hold(dotted, kind, tensor)

    def hold(self, dotted: str, kind: str, tensor: Tensor) -> None:
        """Own one more tensor, under the user's name."""
        container, name = self._container(dotted)
        if kind == "parameter":
            container.register_parameter(name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))
        else:
            container.register_buffer(name, tensor, persistent=kind == "buffer")

    def _container(self, dotted: str) -> tuple[nn.Module, str]:
        *path, name = dotted.split(".")
        module: nn.Module = self
        for atom in path:
            if atom not in module._modules:
                module.add_module(atom, nn.Module())
            module = module.get_submodule(atom)
        return module, name

    def bind(self, graph: fx.Graph, bound: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        """The graph as a Python function over this body: `f(*placeholders) -> tuple of outputs`.

        `bound` says what a node's target is over this body, by default `self.bound`.
        """
        function = self.function_of(graph, bound)
        return lambda *args: function(self, *args)

    def function_of(self, graph: fx.Graph, bound: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        """The graph as a Python function of a body and its placeholders; see `bind`."""
        code = graph.python_code("self")
        scope = {name: (bound or self.bound)(item) for name, item in code.globals.items()}
        return _with_source(code.src, scope)

    def bound(self, target: Any) -> Any:
        """What a node's target is over this body: a loop calls the body's leaves, all else is itself."""
        if not isinstance(target, Loop):
            return target.over(self.bind) if isinstance(target, Nested) else target
        from snnpart.scan import Rounds, Scan  # they trace the layers' steps, for which they need graphs

        return Rounds(target, self.bind, self.bound) if target.together else Scan(target, self.bind, self.get_submodule)
