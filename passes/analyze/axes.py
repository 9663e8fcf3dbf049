"""The time axis of values: where T enters, and how it moves through the dims of operations, both ways.

T enters by an input whose time dim is given, by a neuron layer that takes all T steps in one call (its input and its
result), and by a stack of the T steps of a loop. From there it follows the links of `dims`: forward to consumers, then
backward to producers, then forward again, so that every value between two such places is found in three sweeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from snnpart import facts
from snnpart.errors import PlanError
from snnpart.facts import Value
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.dims import Dims, links
from snnpart.passes.analyze.kinds import first_value

LAYOUTS = {0: "TNCHW", 1: "NTCHW"}


@dataclass(frozen=True, slots=True)
class Axis:
    """T lies in dim `dim`, alone or merged with the batch, and has `steps` steps."""

    dim: int
    merged: bool
    steps: int


Axes = dict[fx.Node, Axis]


def find(graph: SpikeGraph, steps: Mapping[fx.Node, int]) -> Axes:
    """The time axis of every value that has one; `steps` are the loop steps at which values are made.

    Raises:
        PlanError: a neuron layer takes a dim as time that grows with the batch.
    """
    axes = _seeds(graph, steps)
    nodes = list(graph.graph.nodes)
    for sweep in (_forward, _backward, _forward):
        for node in nodes if sweep is _forward else reversed(nodes):
            sweep(node, axes)
    return axes


def _seeds(graph: SpikeGraph, steps: Mapping[fx.Node, int]) -> Axes:
    axes: Axes = {}
    given = {info.name: info.time_dim for info in graph.inputs}
    for node in graph.graph.nodes:
        if node.op == "placeholder" and given.get(str(node.target)) is not None:
            _seed(axes, node, given[str(node.target)])
        elif node.op == "call_module" and node.args and isinstance(node.args[0], fx.Node):
            dim = adapter_for(graph.leaves[str(node.target)].module).time_dim(graph.leaves[str(node.target)].module)
            _check_not_batch(node, dim)
            _seed(axes, node, dim)
            _seed(axes, node.args[0], dim)
        elif isinstance(node.target, Loop):
            _seed_loop(axes, node, node.target)
        elif kinds.name_of(node) == "stack":
            _seed_stack(axes, node, steps)
    return axes


def _seed_loop(axes: Axes, node: fx.Node, loop: Loop) -> None:
    """Steps are dim 0 of what a loop takes apart and puts together."""
    if loop.keep[:1] == ("all",):
        _seed(axes, node, 0)
    for sequence in node.args[0]:  # type: ignore[union-attr]
        _seed(axes, sequence, 0)  # type: ignore[arg-type]


def _seed(axes: Axes, node: fx.Node, dim: int | None) -> None:
    value = first_value(node)
    if dim is not None and value is not None and dim < len(value.shape):
        axes.setdefault(node, Axis(dim, False, value.shape[dim]))


def _check_not_batch(node: fx.Node, dim: int | None) -> None:
    value = kinds.value_of(node.args[0])
    if dim is None or value is None or dim >= len(value.shape) or not value.slopes[dim]:
        return
    raise PlanError(
        f"dim {dim} of the input {list(value.shape)} is the batch, but neuron layer '{node.target}' takes it as time",
        where=facts.place(node),
        fix='say where time is, as in input_layout="TNCHW", or put the layer into single-step mode',
    )


def _seed_stack(axes: Axes, node: fx.Node, steps: Mapping[fx.Node, int]) -> None:
    """A stack of values made at steps 0, 1, ... is the loop's result over time."""
    value, items = first_value(node), node.args[0]
    if value is None or not isinstance(items, (tuple, list)) or len(items) < 2:
        return
    made = [steps.get(item) if isinstance(item, fx.Node) else None for item in items]
    repeated = len({item for item in items if isinstance(item, fx.Node)}) == 1
    if made == list(range(len(items))) or (repeated and made[0] is None):
        _seed(axes, node, kinds.argument(node, 1, "dim", 0) % len(value.shape))


def _forward(node: fx.Node, axes: Axes) -> None:
    if node in axes or first_value(node) is None:
        return
    moved = (_across(source, node, axes[source], False) for source in kinds.tensor_inputs(node) if source in axes)
    _take_first(axes, node, moved)


def _backward(node: fx.Node, axes: Axes) -> None:
    if node not in axes:
        return
    for source in kinds.tensor_inputs(node):
        if source not in axes and first_value(source) is not None:
            _take_first(axes, source, [_across(source, node, axes[node], True)])


def _take_first(axes: Axes, node: fx.Node, found: Iterable[Axis | None]) -> None:
    axis = next((one for one in found if one is not None), None)
    if axis is not None:
        axes[node] = axis


def _across(source: fx.Node, node: fx.Node, axis: Axis, back: bool) -> Axis | None:
    """The axis on the other side of the operation: of its result, or (back) of its input."""
    before, after = first_value(source), first_value(node)
    assert before is not None and after is not None  # the sweeps only come here with tensors on both sides
    for ins, outs in links(node, source):
        here, there = (outs, ins) if back else (ins, outs)
        if axis.dim in here:
            values = (after, before) if back else (before, after)
            return _move(axis, here, there, *values)
    return None


def _move(axis: Axis, here: Dims, there: Dims, old: Value, new: Value) -> Axis | None:
    if len(here) == len(there) == 1:
        same = axis.merged or new.shape[there[0]] == axis.steps
        return Axis(there[0], axis.merged, axis.steps) if same else None
    alone = [d for d in there if new.shape[d] == axis.steps and not new.slopes[d]]
    if axis.merged:
        if alone:
            return Axis(alone[0], False, axis.steps)
    else:
        inner = _size(old, here, lambda d: d > axis.dim)
        exact = [d for d in alone if _size(new, there, lambda other, d=d: other > d) == inner]  # type: ignore[misc]
        if exact:
            return Axis(exact[0], False, axis.steps)
        if not _batch_among(old, here, axis.dim):
            return None
    growing = [d for d in there if new.slopes[d]] or list(there[:1])
    return Axis(growing[0], True, axis.steps)


def _size(value: Value, dims: Dims, wanted: Callable[[int], bool]) -> int:
    return math.prod(value.shape[d] for d in dims if wanted(d))


def _batch_among(value: Value, dims: Dims, time: int) -> bool:
    """Whether a dim that is merged with time is the batch: it grows, or (in a graph of fixed batch) lies beside it."""
    if any(value.slopes):
        return any(value.slopes[d] for d in dims if d != time)
    return dims == (0, 1)
