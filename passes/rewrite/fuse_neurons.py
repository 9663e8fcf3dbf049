"""fuse-neurons: a norm, the neuron that reads it, and the addition behind become one operation (`ops_fused`).

It works on the graphs of stages, after channels are dealt out and collectives stand in them, when the plan says so
(`Plan.fuse`): a fused node is one kernel forward and at most two backward, and keeps x for backward where the separate
operations keep x, the norm's result, and the membrane of every step.

A neuron is fused if its step can be recorded and written as a kernel (`neuron_step`, `step_code`), and only one
sequence that it gives is used. It may go through [T, N, ...], [N, T, ...] or [N*T, ...] (`scan_order`). What is taken
along:

- before it an `ops.batch_norm` that only the neuron reads, over all steps at once, with a momentum, or
  `batch_norm_steps` of at most `STEPS_APART` steps; where the input is the same at each step, its expansion over the
  steps, and `ops.batch_norm_copies` or `batch_norm_repeated`;
- the views between, if they merge or split [T, N];
- behind it an addition of a value of the same shape, if nothing else reads the spikes.

A neuron whose step has no kernel text, but which draws no random numbers, becomes a region too, without the norm:
torch.compile makes the kernels of that one. What stays as it is, is named with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from snnpart import facts, ops
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, Origin, State, Value
from snnpart.first_states import own_start, start_number
from snnpart.frameworks import adapter_for
from snnpart.graph import LeafInfo
from snnpart.neuron_scan import draws, leaf_number, order_of_scan, step_dims, step_of, steps_of
from snnpart.neuron_step import NeuronStep, StepError
from snnpart.ops_fused import (
    STEPS_APART,
    FusedNeuron,
    is_expansion,
    is_turned,
    parts,
    result_nodes,
    scan_input,
    sequence_of,
    splits_time,
)
from snnpart.ops_time import Loop, batch_norm_repeated, batch_norm_steps, leaf_paths
from snnpart.passes.analyze.cost import in_fused_kernels
from snnpart.passes.rewrite.repeated_input import put_back, with_sequence
from snnpart.scan_order import Order, order_of

NAME = "fuse-neurons"


def fuse_neurons(
    graph: fx.Graph,
    leaves: Mapping[str, LeafInfo],
    profile: MachineProfile,
    *,
    state: str = "float32",
    way: str = "kernel",
) -> tuple[str, ...]:
    """Fuse what can be in a stage graph, in place; why each other neuron has no kernel of its own.

    Args:
        state: the dtype that membranes are rounded to from step to step.
        way: how a GPU runs those that can be written as kernels (`ops_fused.WAYS`).
    """
    notes: list[str] = []
    kept = "" if state == "float32" else f"; its states are not rounded to {state}"
    for node in [node for node in graph.nodes if _is_single_step(node, leaves)]:
        notes.append(f"{facts.place(node)} is not fused: it takes one step a call, outside any loop over time{kept}")
    for scan in [node for node in graph.nodes if _is_scan(node, leaves)]:
        own = with_sequence(scan)
        try:
            _check_form(own, leaves)
            step = _kernel_step(own, leaves)
        except StepError as error:
            notes.append(f"{facts.place(scan)} is not fused: {error}{kept}")
            if own is not scan:
                put_back(scan, own)
            continue
        if own is not scan:
            graph.erase_node(scan)
        if isinstance(step, str):
            notes.append(f"{facts.place(own)} is compiled, not generated: {step}{kept}")
            how = FusedNeuron(fx.Graph(), 0, state, way="compiled")
        else:
            how = FusedNeuron(fx.Graph(), 0, state, step, way)
        modules = _modules(own, leaves)
        how = replace(how, steps=steps_of(own, modules))
        chain = _chain(own, order_of_scan(own, modules), how.steps, norm=not isinstance(step, str))
        _fuse(graph, chain, profile, how)
    return tuple(notes)


def is_fused(scan: fx.Node, leaves: Mapping[str, LeafInfo]) -> bool:
    """Whether `fuse_neurons` makes the node one operation. A loop whose steps all read one value is not seen to be."""
    if not _is_scan(scan, leaves):
        return False
    try:
        _check_form(scan, leaves)
        _kernel_step(scan, leaves)
    except StepError:
        return False
    return True


def _kernel_step(scan: fx.Node, leaves: Mapping[str, LeafInfo]) -> NeuronStep | str:
    """The step that a kernel is generated from, or why there is none. StepError where nothing else can run it either:
    a compiler draws other random numbers."""
    modules = _modules(scan, leaves)
    try:
        _check_sequence(scan)
        step = step_of(scan, modules)
        _check_parameters(scan, leaves, step)
    except StepError as error:
        drawn = draws(scan, modules)
        if drawn:
            raise StepError("it draws random numbers") from error
        if drawn is None:
            raise
        return str(error)
    return step


def _check_sequence(scan: fx.Node) -> None:
    """StepError where a layer sums its steps up."""
    made = result_nodes(scan)
    if made is None or facts.need(made[-1], Value).shape != facts.need(scan_input(scan), Value).shape:
        raise StepError("its result is no sequence of its input's shape")


def _modules(scan: fx.Node, leaves: Mapping[str, LeafInfo]) -> dict[str, nn.Module]:
    return {path: leaves[path].module for path in leaf_paths(scan)}


def _is_scan(node: fx.Node, leaves: Mapping[str, LeafInfo]) -> bool:
    return isinstance(node.target, Loop) or _is_neuron(node, leaves) and not _is_single_step(node, leaves)


def _is_single_step(node: fx.Node, leaves: Mapping[str, LeafInfo]) -> bool:
    """Whether a node is a neuron layer that takes one step."""
    if not _is_neuron(node, leaves):
        return False
    module = leaves[str(node.target)].module
    return order_of(module) is None and adapter_for(module).time_dim(module) is None


def _is_neuron(node: fx.Node, leaves: Mapping[str, LeafInfo]) -> bool:
    return node.op == "call_module" and leaves[str(node.target)].neuron


def _check_parameters(scan: fx.Node, leaves: Mapping[str, LeafInfo], step: NeuronStep) -> None:
    """StepError for a tensor of a leaf that is neither one number nor one for each channel."""
    paths = leaf_paths(scan)
    dims = step_dims(scan, _modules(scan, leaves))
    for name in step.parameters:
        leaf, _, inside = name.partition(".")
        if not inside:
            continue
        value: Any = functools.reduce(getattr, inside.split("."), leaves[paths[leaf_number(leaf)]].module)
        shape = tuple(value.shape)
        padded = (1,) * (dims - len(shape)) + shape
        if torch.Size(shape).numel() > 1 and (dims < 2 or padded[1] != torch.Size(shape).numel()):
            raise StepError(f"'{inside}' has shape {shape}, which is no number for each channel")


def _check_form(scan: fx.Node, leaves: Mapping[str, LeafInfo]) -> None:
    state = facts.get(scan, State)
    if state is not None and state.of > 1:
        raise StepError(f"it is called {state.of} times, with state handed on")
    if scan.op == "call_module":
        if order_of(leaves[str(scan.target)].module) is None:
            raise StepError("time is neither the first nor the second dim of its input")
        if not scan.args or any(item is not None for item in (*scan.args[1:], *scan.kwargs.values())):
            raise StepError("it is given more than its input")
        _check_results(scan)
        return
    _check_loop(scan)


def _check_results(scan: fx.Node) -> None:
    """StepError where more is used of a layer than its first result, or each step of that, stacked again."""
    if result_nodes(scan) is None:
        step, values = facts.need(scan_input(scan), Value).shape[1:], [facts.get(user, Value) for user in scan.users]
        each = all(value is not None and value.shape == step for value in values)
        raise StepError("each step's result is used by itself" if each else "other results than its first are used")


def _check_loop(scan: fx.Node) -> None:
    sequences, fixed, carried = scan.args
    if len(sequences) != 1:  # type: ignore[arg-type]
        raise StepError(f"its loop goes through {len(sequences)} sequences")  # type: ignore[arg-type]
    if len({user.args[1] for user in scan.users}) != 1 or len(scan.users) != 1:
        raise StepError("several results of its loop are used")
    if scan.target.keep[next(iter(scan.users)).args[1]] != "all":  # type: ignore[union-attr, index]
        raise StepError("only its last step is used")
    step = facts.need(sequence_of(scan), Value).shape[1:]
    for item in fixed:  # type: ignore[union-attr]
        value = facts.get(item, Value) if isinstance(item, fx.Node) else None
        if value is not None and not _is_parameter(value.shape, step):
            raise StepError(f"each step reads a tensor of shape {value.shape}, which is no number for each channel")
    for item in carried:  # type: ignore[union-attr]
        if isinstance(item, tuple):
            raise StepError("its first state is given from outside")


def _is_parameter(shape: tuple[int, ...], step: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is one number, or one for each channel (dim 1 of a step)."""
    numel = int(torch.Size(shape).numel())
    if numel == 1:
        return True
    padded = (1,) * (len(step) - len(shape)) + shape
    return len(step) > 1 and len(padded) == len(step) and numel == padded[1] == step[1]


@dataclass(frozen=True)
class _Chain:
    """The nodes of a region in order, its scan, and where x comes in."""

    nodes: tuple[fx.Node, ...]
    scan: fx.Node


def _chain(scan: fx.Node, order: Order, steps: int, *, norm: bool) -> _Chain:
    made = result_nodes(scan) or []
    turn, starts = _own_turn(scan), _own_starts(scan)
    if order.samples_first:
        before = [*(_norm_before(scan, {scan, *turn, *starts}, steps=None) if norm else []), *turn]
    else:
        before = _before(scan, starts) if norm else _expansion(scan_input(scan))
    shapes = order.shapes(facts.need(made[-1], Value).shape, steps)
    return _Chain((*before, *starts, *made, *_addition_behind(made[-1], shapes)), scan)


def _own_turn(scan: fx.Node) -> list[fx.Node]:
    """The view that turns samples and steps round before a loop, now read by this loop alone."""
    if not is_turned(scan):
        return []
    turned = sequence_of(scan)
    with scan.graph.inserting_before(scan):
        own = scan.graph.node_copy(turned)
    scan.args = ((own,), *scan.args[1:])
    _erase_unread(turned)
    return [own]


def _own_starts(scan: fx.Node) -> list[fx.Node]:
    """What makes the first states that are numbers, now read by this scan alone."""
    if scan.op == "call_module":
        return []
    sequences, fixed, carried = scan.args
    found = [i for i in carried if isinstance(i, fx.Node) and start_number(i, fixed) is not None]  # type: ignore[union-attr, arg-type]
    own = {start: own_start(start) for start in found}
    scan.args = (sequences, fixed, tuple(own[item][-1] if item in own else item for item in carried))  # type: ignore[union-attr, index]
    for start in own:
        _erase_unread(start)
    return [node for nodes in own.values() for node in nodes]


def _erase_unread(node: fx.Node) -> None:
    if node.users or node.op == "placeholder":
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)


def _before(scan: fx.Node, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """What alone leads to the scan, and to its first states: an expansion over the steps, and a norm with the views
    behind it."""
    node = scan_input(scan)
    passed, steps = _expansion(node), facts.need(node, Value).shape[0]
    if not passed:
        return _norm_before(scan, {scan, *starts}, steps)
    norm: Any = passed[0].args[0]
    for_all = any(_is_norm(norm, kind, {passed[0]}) for kind in (ops.batch_norm_copies, batch_norm_repeated))
    return [norm, *passed] if for_all and norm.args[9] == steps else passed


def _norm_before(scan: fx.Node, readers: set[fx.Node], steps: int | None) -> list[fx.Node]:
    """A norm of a scan's sequence that only these nodes read, and the views behind it: over all steps at once, or over
    each of so many."""
    node: Any = scan_input(scan)
    passed: list[fx.Node] = []
    while splits_time(node) and readers.issuperset(node.users):
        passed.insert(0, node)
        readers.add(node)
        node = node.args[0]
    apart = steps is not None and _is_norm(node, batch_norm_steps, readers) and node.args[9] == steps <= STEPS_APART
    return [node, *passed] if apart or _is_norm(node, ops.batch_norm, readers) else []


def _expansion(node: fx.Node) -> list[fx.Node]:
    """The nodes that repeat a value [N, ...] over the steps, if only the scan reads them."""
    if not is_expansion(node) or len(node.users) != 1:
        return []
    source: Any = node.args[0]
    new_dim = source.target is torch.unsqueeze and source.args[1] == 0 and len(source.users) == 1
    return [source, node] if new_dim else []


def _is_norm(node: Any, kind: Any, readers: Collection[fx.Node]) -> bool:
    """Whether a node is a norm of the kind that only these nodes read, and whose average is no cumulative one."""
    if not isinstance(node, fx.Node) or node.target is not kind:
        return False
    return set(node.users) <= set(readers) and node.args[7] is not None


def _addition_behind(node: fx.Node, shapes: Collection[tuple[int, ...]]) -> list[fx.Node]:
    """The views of these shapes and the addition that alone read a neuron's result; nothing where there is no such
    addition."""
    passed: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if splits_time(user) and facts.need(user, Value).shape in shapes:
            passed.append(user)
        elif user.target is torch.add and _is_plain_addition(user):
            return [*passed, user]
        else:
            break
        node = user
    return []


def _is_plain_addition(node: fx.Node) -> bool:
    values = [facts.get(item, Value) if isinstance(item, fx.Node) else None for item in node.args]
    same = len(values) == 2 and values[0] is not None and values[1] is not None and values[0].shape == values[1].shape
    return same and node.args[0] is not node.args[1] and not node.kwargs


def _fuse(graph: fx.Graph, chain: _Chain, profile: MachineProfile, how: FusedNeuron) -> None:
    """One node for the chain, which runs as `how` says."""
    end = chain.nodes[-1]
    inputs = list(dict.fromkeys(n for node in chain.nodes for n in node.all_input_nodes if n not in chain.nodes))
    region, mapping = fx.Graph(), {}
    for node in inputs:
        mapping[node] = region.placeholder(node.name)
        mapping[node].meta = dict(node.meta)
    for node in chain.nodes:
        mapping[node] = region.node_copy(node, mapping.__getitem__)
    region.output((mapping[end],))
    with graph.inserting_after(end):
        fused = graph.call_function(replace(how, region=region), tuple(inputs))
    fused.meta = dict(end.meta)
    origin = facts.get(chain.scan, Origin) or Origin()
    facts.put(fused, replace(origin, made_by=NAME), _cost(chain, fused, profile))
    end.replace_all_uses_with(fused)
    for node in reversed(chain.nodes):
        graph.erase_node(node)


def _cost(chain: _Chain, fused: fx.Node, profile: MachineProfile) -> Cost:
    """Counted before the chain is gone."""
    found = parts(fused.target.region)  # type: ignore[union-attr]
    costs = [cost for node in chain.nodes if (cost := facts.get(node, Cost)) is not None]
    sums = found.norm is not None and found.norm.args[6] is not False
    x, residual = (0.0 if item is None else float(facts.need(item, Value).bytes) for item in (found.x, found.residual))
    return in_fused_kernels(costs, x, facts.need(fused, Value), profile, residual=residual, sums=sums)
