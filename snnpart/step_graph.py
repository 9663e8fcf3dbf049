"""One step of a time loop as a flat graph of tensor operations, with the neuron layers that it calls traced into.

Every operation is the framework's own, the surrogate with its gradient too; what a layer does around them (attributes,
checks) is gone. `step_sort` says how often each operation must run, `scan` runs them.

`open_step` returns None where a step cannot be opened: it draws random numbers, writes buffers, or branches on data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from snnpart import effects, facts
from snnpart.errors import SnnpartError
from snnpart.facts import Value
from snnpart.graph import BATCH_SIZE, TRAINING, SpikeGraph, output_node
from snnpart.trace import trace


@dataclass(frozen=True)
class Shape:
    """How the values of a step are given: how many are sequences, fixed and carried, in this order."""

    sequences: int
    fixed: int
    carried: int


@dataclass(frozen=True, eq=False)
class Step:
    """A step as a flat graph over tensors: `graph(*sequences, *fixed, *carried) -> (*carried, *results)`."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    shape: Shape

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """What is carried to the next step, then the results."""
        found: tuple[fx.Node, ...] = output_node(self.graph).args[0]  # type: ignore[assignment]
        return found

    @property
    def carried(self) -> tuple[fx.Node, ...]:
        """What is carried to the next step."""
        return self.outputs[: self.shape.carried]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """What the loop keeps."""
        return self.outputs[self.shape.carried :]

    @property
    def operations(self) -> tuple[fx.Node, ...]:
        """What computes something."""
        return tuple(node for node in self.graph.nodes if node.op in ("call_function", "call_method"))

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        """The reads of the layers' tensors."""
        return tuple(node for node in self.graph.nodes if node.op == "get_attr")

    def group(self, name: str) -> tuple[fx.Node, ...]:
        """The placeholders of the `sequences`, the `fixed` or the `carried` values."""
        first = {"sequences": 0, "fixed": self.shape.sequences, "carried": self.shape.sequences + self.shape.fixed}
        return self.inputs[first[name] :][: getattr(self.shape, name)]


class StepModule(nn.Module):
    """Calls a body with the steps of its neuron layers in the open: what the tracer is given."""

    def __init__(
        self, body: fx.Graph, leaves: Mapping[str, nn.Module], fill: Callable[[Sequence[Tensor]], Sequence[Any]]
    ) -> None:
        """`fill` makes the body's arguments of the tensors among them."""
        super().__init__()
        self.body, self.fill = body, fill
        self.layers = nn.ModuleList(leaves.values())
        self.at = {path: i for i, path in enumerate(leaves)}

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        values: dict[fx.Node, Any] = {}
        given = iter(self.fill(tensors))
        for node in self.body.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op != "output":
                values[node] = self._call(node, *map_arg((node.args, node.kwargs), values.__getitem__))
        made = map_arg(output_node(self.body).args[0], values.__getitem__)
        return tuple(pytree.tree_leaves(made))

    def _call(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if node.op == "call_module":
            layer: Any = self.layers[self.at[str(node.target)]]
            return type(layer).forward(layer, *args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def tensor(self, name: str) -> Any:
        """A tensor of a layer by the name that the step's graph reads it by, as it now is."""
        found: Any = self
        for atom in name.split("."):
            found = getattr(found, atom)
        return found


def open_step(module: StepModule, args: Sequence[Any], shape: Shape) -> Step | None:
    """The step that `module` computes for values like `args`; `shape` counts its tensors. None: it stays closed."""
    tensors = [x.detach().requires_grad_(x.requires_grad) for x in args]
    try:
        with torch.enable_grad():
            traced = trace(module, tuple(tensors), in_dims=(None,) * len(tensors), training=module.training)
    except SnnpartError:
        return None
    if _has_more_than_values(traced):
        return None
    _share_equal(traced.graph)
    _end_gradients_early(traced.graph)
    inputs = tuple(node for node in traced.graph.nodes if node.op == "placeholder")
    return Step(traced.graph, inputs, shape) if len(inputs) == len(tensors) else None


def _has_more_than_values(traced: SpikeGraph) -> bool:
    """Whether a step does more than compute tensors from tensors."""
    if traced.leaves or traced.states or traced.out_constants:
        return True
    return any(
        effects.is_random(node)
        or effects.writes_buffer(node)
        or effects.is_in_place(node)
        or (node.op == "placeholder" and node.target == BATCH_SIZE)
        or (node.op == "get_attr" and node.target == TRAINING)
        for node in traced.graph.nodes
    )


def _share_equal(graph: fx.Graph) -> None:
    """Compute once what the step computes twice from the same values; a copy that only loses its gradient goes."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        if name_of(node) == "clone" and node.users and all(name_of(user) == "detach" for user in node.users):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
            continue
        key = (node.op, node.target, repr(node.args), repr(node.kwargs))
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
        known.setdefault(key, node)


def _end_gradients_early(graph: fx.Graph) -> None:
    """Detach what goes into values that are only read detached: autograd then records nothing of them."""
    without: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        computes = node.op in ("call_function", "call_method") and name_of(node) != "detach"
        if computes and node.users and all(name_of(user) == "detach" or user in without for user in node.users):
            without.add(node)
    ended: dict[fx.Node, fx.Node] = {}

    def end(source: fx.Node, reader: fx.Node) -> fx.Node:
        value = facts.get(source, Value)
        if source in without or value is None or not value.requires_grad:
            return source
        if source not in ended:
            with graph.inserting_before(reader):
                ended[source] = graph.call_function(torch.detach, (source,))
            facts.put(ended[source], value)
        return ended[source]

    for node in [node for node in graph.nodes if node in without]:
        node.args, node.kwargs = map_arg((node.args, node.kwargs), partial(end, reader=node))
    for node in list(graph.nodes):
        if name_of(node) == "detach" and node.args[0] in without:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)


def name_of(node: fx.Node) -> str:
    """The plain name of a node's operation."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def carries_alike(step: Step) -> bool:
    """Whether a step returns what it carries in the shapes and types in which it was given."""
    pairs = zip(step.group("carried"), step.outputs, strict=False)
    return all(_shape(one) == _shape(other) for one, other in pairs)


def _shape(node: fx.Node) -> object:
    value = facts.get(node, Value)
    return None if value is None else (value.shape, value.dtype)
