"""fold-time: a Python loop over time, which the trace shows as T copies of its body, becomes one body over all steps.

What does not depend on other steps runs once on [T*N, ...] (convolutions, linears, norms, pooling, views,
element-wise operations); what is equal at every step runs once; neuron layers that take all steps do so; and what hangs
together from step to step (neuron state, recurrent weights) is one `Loop` node that runs step after step. So the
graph's size does not depend on T.

    steps          which node runs at which step
    first_numbers  how a state that begins as a Python number enters the first step
    columns        which nodes are the same operation at successive steps, and what they carry over
    weights        what is computed from the network's tensors alone, once
    parts          what depends on what: the form of each part (`forms`), the parts that stay sequential
    emit           the new graph (`sequential` the loops, `views` what enters and leaves)

BatchNorm keeps statistics per step and T updates in training mode. Dropouts draw all steps' masks at once: as many
independent numbers as the loop drew, but others. Sums over steps may be ordered otherwise: the tier is `reassociates`.

Nodes that are no copies stay as they are, and what does not fold is noted with node, line and reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.frameworks import adapter_for, clone_leaf
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze import kinds
from snnpart.passes.rewrite.canonicalize import sweep
from snnpart.passes.rewrite.fold_time import parts as parts_of
from snnpart.passes.rewrite.fold_time import steps as steps_of
from snnpart.passes.rewrite.fold_time import totals, views
from snnpart.passes.rewrite.fold_time.columns import Column, Columns, match
from snnpart.passes.rewrite.fold_time.emit import PASS, Emitter, Unplaced, carries_gradient
from snnpart.passes.rewrite.fold_time.first_numbers import put_in_place
from snnpart.passes.rewrite.fold_time.parts import Entangled, Part
from snnpart.passes.rewrite.fold_time.sequential import emit_loop
from snnpart.passes.rewrite.fold_time.steps import Steps
from snnpart.passes.rewrite.fold_time.weights import compute_once

_ROUNDS = 64
_LOOPS = 8


@dataclass(frozen=True)
class FoldTime:
    """Folds the time loops of the graph, one after the other."""

    name: ClassVar[str] = PASS
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "reassociates"

    def run(self, graph: SpikeGraph) -> None:
        if steps_of.find(graph) is None:
            return
        compute_once(graph.graph)
        done: list[str] = []
        left: dict[str, str] = {}
        for _ in range(_LOOPS):
            size, folded = len(graph.graph.nodes), _fold_one(graph)
            if folded is None:
                break
            columns, parts = folded
            left = {name: why for name, why in left.items() if name not in {node.name for node in columns.of}}
            left = _left(columns) | left
            if len(graph.graph.nodes) >= size and done:
                break
            done += _done(columns, parts)
        if done:
            graph.notes[PASS] = "\n".join((*done, *left.values()))


def _fold_one(graph: SpikeGraph) -> tuple[Columns, list[Part]] | None:
    """Fold a loop, if there is one: with what reads a frame at the frame's step, or, where nothing but such reads folds
    so, at the step before."""
    folded: tuple[Columns, list[Part]] | None = None
    for early in (False, True):
        steps = steps_of.find(graph, early=early)
        if steps is None:
            break
        put_in_place(steps)
        folded = _fold(graph, _better(graph, steps))
        if any(not column.indices for column in folded[0].columns):
            break
    return folded


def _better(graph: SpikeGraph, steps: Steps) -> Steps:
    """The steps under which more is alike: as they are, or without first values."""
    columns, _ = _arrange(graph, steps, {})
    without = steps.without_first_values()
    if not columns.reasons or len(without.of) == len(steps.of):
        return steps
    others, _ = _arrange(graph, without, {})
    return without if len(others.of) > len(columns.of) else steps


def _fold(graph: SpikeGraph, steps: Steps) -> tuple[Columns, list[Part]]:
    """Fold one loop. Parts that make what the new graph could not hold are given up until none does."""
    given_up: dict[fx.Node, str] = {}
    for _ in range(_ROUNDS):
        columns, parts = _arrange(graph, steps, given_up)
        try:
            _replace(graph, columns, parts)
        except Unplaced as found:
            given_up |= _without(found.node, parts)
        else:
            return columns, parts
    return Columns(steps.count, [], {}, given_up, steps.of), []


def _replace(graph: SpikeGraph, columns: Columns, parts: list[Part]) -> None:
    """Put the graph of the parts in the place of the graph."""
    if columns.columns:
        for column in columns.columns:
            _mark_gradient(column)
        emitter = Emitter(graph.graph, columns)
        for part in parts:
            _emit(emitter, part)
        _take_all_steps(graph, parts)
        sweep(emitter.graph)
        _pass_gradients_on(emitter.graph)
        graph.graph = emitter.graph


def _mark_gradient(column: Column) -> None:
    """The model stands for all steps, also for those that carry a gradient where it carries none."""
    value = facts.get(column.model, Value)
    if value is not None and carries_gradient(column.nodes):
        facts.put(column.model, replace(value, requires_grad=True))


def _pass_gradients_on(graph: fx.Graph) -> None:
    """What reads a value that carries a gradient for the sake of another step carries it too, up to the next detach:
    a pipeline that is cut there must know."""
    for node in graph.nodes:
        value, name = facts.get(node, Value), kinds.name_of(node)
        floats = value is not None and value.dtype.is_floating_point and not value.requires_grad
        if floats and name != "detach" and not name.endswith("_like") and carries_gradient(node.all_input_nodes):
            facts.put(node, replace(facts.need(node, Value), requires_grad=True))


def _without(node: fx.Node, parts: list[Part]) -> dict[fx.Node, str]:
    """The columns to give up, by their models, so that the node stays as it is: its part's."""
    why = f"%{node.name}, which only its first step makes, is read outside"
    own = [part for part in parts if node in part.nodes and part.columns] or parts
    return {column.model: why for part in own for column in part.columns}


def _arrange(graph: SpikeGraph, steps: Steps, fixed: Mapping[fx.Node, str]) -> tuple[Columns, list[Part]]:
    """Columns and parts; columns that stand in a cycle with other nodes are given up until none does, as `fixed` are
    from the start."""
    given_up = dict(fixed)
    for _ in range(_ROUNDS):
        columns = match(steps, given_up)
        for column in columns.columns:
            if column.indices and not views.is_view(column):
                (values, *_) = column.indices.values()
                given_up[column.model] = f"its steps are no view of one tensor: its index takes the values {values}"
        if any(column.model in given_up for column in columns.columns):
            continue
        try:
            return columns, parts_of.find(graph, columns, lambda node: _multi_step(graph, node) is not None)
        except Entangled as found:
            given_up |= dict.fromkeys(found.nodes, found.why)
    return Columns(steps.count, [], {}, given_up, steps.of), []


def _emit(emitter: Emitter, part: Part) -> None:
    if part.kind == "plain":
        for node in part.nodes:
            if not views.emit_together(emitter, node):
                emitter.copy(node)
    elif part.kind == "loop":
        emit_loop(emitter, part)
    elif part.kind == "total":
        emitter.total(part.columns[0], totals.sum_of(emitter.columns))
    else:
        (column,) = part.columns
        {
            "once": emitter.once,
            "merged": emitter.call_merged,
            "stacked": emitter.call_stacked,
            "layer": emitter.layer,
            "slices": lambda one: views.emit_slices(emitter, one),
        }[part.kind](column)


def _multi_step(graph: SpikeGraph, node: fx.Node) -> fx.Node | None:
    """The node, if it calls a layer that can take all steps in one call; it is then called nowhere else."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs or facts.get(node, Value) is None:
        return None
    module = graph.leaves[str(node.target)].module
    return node if _in_steps(graph, str(node.target)) is not module else None


def _in_steps(graph: SpikeGraph, path: str) -> object:
    """A copy of the leaf that takes all steps; the leaf itself when it cannot."""
    leaf = graph.leaves[path]
    adapter = adapter_for(leaf.module)
    prefix = len(path) + 1
    inside = {
        name[prefix:]: info.tensor
        for info in graph.tensors.values()
        for name in (info.name, *info.aliases)
        if info.leaf == path and name.startswith(path + ".")
    }
    copy = clone_leaf(leaf.module, inside)
    adapter.for_layout(copy, multi_step=True)
    return copy if adapter.time_dim(copy) == 0 else leaf.module


def _take_all_steps(graph: SpikeGraph, parts: list[Part]) -> None:
    """Put copies that take all steps in the place of the layers that now do."""
    for part in parts:
        if part.kind == "layer":
            path = str(part.columns[0].model.target)
            graph.leaves[path] = replace(graph.leaves[path], module=_in_steps(graph, path))  # type: ignore[arg-type]


def _done(columns: Columns, parts: list[Part]) -> list[str]:
    """What was folded, and why parts of it run step by step."""
    once = sum(part.kind not in ("plain", "loop") for part in parts)
    loops = sum(part.kind == "loop" for part in parts)
    why = [f"{facts.place(part.columns[0].model)} runs step by step: {part.why}" for part in parts if part.why]
    return [f"{columns.steps} steps: {once} operations in one call each, {loops} parts step by step", *why]


def _left(columns: Columns) -> dict[str, str]:
    """By name, why nodes were not folded; a later round may still fold them."""
    return {node.name: f"{facts.place(node)} stays as it is: {why}" for node, why in columns.reasons.items()}
