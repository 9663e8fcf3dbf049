"""The all-rank dry run: checks at compile time, on tensors without data, that the ranks' programs fit together.

Checked, each with the rank, stage and node where it fails:

- every tensor of the network is on exactly one stage, or on those that hold a copy, and its slices cover it once;
- what a stage sends is what the next one receives, in order, shape and type, on each tp rank;
- all tp ranks of a stage meet in the same collectives in the same order;
- the schedule runs each microbatch forward and backward once on each stage, and no stage waits for ever;
- every node makes the local shape and type that its `Value` fact states (batch: the example batch).

Graphs that only evaluations run (`StageProgram.evaluation`) are checked for collectives and shapes as well.

Ranks whose slices have the same shapes run the same computation; it is walked once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from snnpart import facts, ops
from snnpart.bits import States
from snnpart.errors import PlanError, SnnpartError, VerifyError
from snnpart.facts import Value, Values
from snnpart.frameworks import adapter_for
from snnpart.graph import BATCH_SIZE, TRAINING
from snnpart.ops_time import TIME_OPS, Nested, all_nodes
from snnpart.program import Action, CompiledProgram, Port, StageProgram, TensorSlice


@dataclass(frozen=True)
class DryRun:
    """What the dry run found: predicted peak bytes and step time of each (stage, tp rank), and how much it checked."""

    peak_bytes: Mapping[tuple[int, int], int]
    microseconds: Mapping[tuple[int, int], float]
    nodes: int


def dry_run(compiled: CompiledProgram) -> DryRun:
    """Check all ranks of `compiled`.

    Raises:
        VerifyError: the programs do not fit together; the message names rank, stage and node.
        PlanError: the schedule cannot be carried out.
    """
    _check_owners(compiled)
    _check_ports(compiled)
    _check_collectives(compiled)
    _check_schedule(compiled.schedule)
    nodes = 0
    walked: set[tuple[Any, ...]] = set()
    for program in compiled.stages.values():
        signature = _signature(program)
        if signature not in walked:
            walked.add(signature)
            nodes += sum(_walk(compiled, program, graph) for graph in program.graphs)
    return DryRun(
        peak_bytes={at: program.predicted_bytes for at, program in compiled.stages.items()},
        microseconds={at: program.predicted_us for at, program in compiled.stages.items()},
        nodes=nodes,
    )


def _rank(program: StageProgram) -> str:
    return f"stage {program.stage}, tp rank {program.tp_rank}"


def _check_owners(compiled: CompiledProgram) -> None:
    owners: dict[str, dict[int, list[TensorSlice]]] = {name: {} for name in compiled.source.tensors}
    for (stage, _), program in sorted(compiled.stages.items()):
        for part in program.tensors:
            owners.setdefault(part.name, {}).setdefault(stage, []).append(part)
    for name, stages in owners.items():
        copies = {part.stages for parts in stages.values() for part in parts}
        if len(stages) != 1 and copies != {tuple(sorted(stages))}:
            what = f"is on the stages {sorted(stages)}" if stages else "is on no stage"
            raise VerifyError(
                f"the tensor '{name}' {what}", where=compiled.source.name, fix="give it exactly one stage"
            )
        for stage, parts in stages.items():
            if len(parts) != compiled.plan.tp:
                raise VerifyError(
                    f"only {len(parts)} of {compiled.plan.tp} tp ranks hold '{name}'", where=f"stage {stage}"
                )
            _check_cover(parts)


def _check_cover(parts: list[TensorSlice]) -> None:
    """The slices of the ranks cover the dim once, or all hold the whole."""
    dims = {part.dim for part in parts}
    if dims == {None}:
        return
    dim = parts[0].dim
    pieces = sorted(piece for part in parts for piece in part.pieces)
    at = 0
    for start, stop in pieces:
        if start != at:
            break
        at = stop
    if len(dims) != 1 or dim is None or at != parts[0].global_shape[dim]:
        raise VerifyError(
            f"the tp ranks' slices {[part.pieces for part in parts]} of '{parts[0].name}' do not cover dim {dim} once",
            where=f"'{parts[0].name}'",
        )


def _check_ports(compiled: CompiledProgram) -> None:
    for (stage, tp_rank), program in compiled.stages.items():
        if stage + 1 < compiled.plan.stage_count:
            after = compiled.stages[stage + 1, tp_rank]
            _check_boundary(program, after)
        elif program.sends:
            raise VerifyError(f"the last stage sends '{program.sends[0].name}' to nobody", where=_rank(program))
        if stage == 0 and program.receives:
            raise VerifyError(f"the first stage waits for '{program.receives[0].name}'", where=_rank(program))


def _check_boundary(before: StageProgram, after: StageProgram) -> None:
    sent, received = [port.name for port in before.sends], [port.name for port in after.receives]
    if sent != received:
        odd = next((a or b for a, b in _padded(sent, received) if a != b), "")
        raise VerifyError(
            f"it sends {sent}, the next stage receives {received}; they differ first at '{odd}'", where=_rank(before)
        )
    for a, b in zip(before.sends, after.receives):
        if _form(a) != _form(b):
            raise VerifyError(
                f"it sends '{a.name}' as {_form(a)}, {_rank(after)} receives it as {_form(b)}", where=_rank(before)
            )


def _padded(a: list[str], b: list[str]) -> Iterable[tuple[str, str]]:
    size = max(len(a), len(b))
    return zip(a + [""] * (size - len(a)), b + [""] * (size - len(b)))


def _form(port: Port) -> tuple[tuple[int, ...], torch.dtype, States | None]:
    return port.value.shape, port.value.dtype, port.states


def _check_collectives(compiled: CompiledProgram) -> None:
    for (stage, _), program in compiled.stages.items():
        first = compiled.stages[stage, 0]
        for graph, other in zip_longest(program.graphs, first.graphs):
            for mine, theirs in zip_longest(_collectives(graph), _collectives(other)):
                if mine is None or theirs is None or (mine.target, mine.args[1:]) != (theirs.target, theirs.args[1:]):
                    raise VerifyError(
                        f"it meets the others in {_call(mine)}, tp rank 0 in {_call(theirs)}", where=_rank(program)
                    )


def _collectives(graph: fx.Graph | None) -> list[fx.Node]:
    """Those of a graph, in order; none where a rank has no such graph."""
    nodes = all_nodes(graph) if graph is not None else ()
    return [node for node in nodes if node.op == "call_function" and node.target in ops.COLLECTIVES]


def _call(node: fx.Node | None) -> str:
    return "nothing" if node is None else f"%{node.name} ({getattr(node.target, '__name__', node.target)})"


def _check_schedule(schedule: Mapping[int, tuple[Action, ...]]) -> None:
    """Carry the schedule out: an action is done when what it waits for is done. By pipeline rank."""
    last = max(action.stage for actions in schedule.values() for action in actions)
    done: set[Action] = set()
    place = dict.fromkeys(schedule, 0)
    moved = True
    while moved:
        moved = False
        for rank, actions in schedule.items():
            while place[rank] < len(actions) and not _missing(actions[place[rank]], last, done):
                done.add(actions[place[rank]])
                place[rank] += 1
                moved = True
    for rank, actions in schedule.items():
        if place[rank] < len(actions):
            action = actions[place[rank]]
            missing = ", ".join(sorted(map(str, _missing(action, last, done))))
            raise PlanError(f"the schedule stops: {action} waits for {missing}", where=f"stage {action.stage}")
    _check_complete(schedule, last)


def _missing(action: Action, last: int, done: set[Action]) -> list[Action]:
    """What an action still waits for."""
    either = lambda need: {replace(need, kind="B"), replace(need, kind="I")} if need.kind in "BI" else {need}  # noqa: E731
    return [need for need in waits_for(action, last) if not either(need) & done]


def waits_for(action: Action, last: int) -> tuple[Action, ...]:
    """What must be done before an action; `last` is the last stage. Where it names I, B will do, and the other way."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (Action(stage - 1, "F", microbatch),) if stage else ()
    if action.kind == "W":
        return (Action(stage, "I", microbatch),)
    own = Action(stage, "F", microbatch)
    return (own, Action(stage + 1, action.kind, microbatch)) if stage < last else (own,)


def _check_complete(schedule: Mapping[int, tuple[Action, ...]], last: int) -> None:
    """Each microbatch forward once and backward once, whole or in two halves, on each stage."""
    every = [action for actions in schedule.values() for action in actions]
    for stage in range(last + 1):
        for microbatch in sorted({action.microbatch for action in every}):
            kinds = sorted(a.kind for a in every if (a.stage, a.microbatch) == (stage, microbatch))
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                wanted = "FIW" if {"I", "W"} & set(kinds) else "FB"
                odd = next((k for k in wanted if k not in kinds), None)
                twice = next((k for k in kinds if kinds.count(k) > 1), "")
                what = f"{stage}{odd}{microbatch} is missing" if odd else f"{stage}{twice}{microbatch} stands twice"
                raise PlanError(f"the schedule is not complete: {what}", where=f"stage {stage}")


def _signature(program: StageProgram) -> tuple[Any, ...]:
    return (
        program.stage,
        tuple(part.shape for part in program.tensors),
        tuple(_form(port) for port in (*program.receives, *program.sends)),
    )


def _walk(compiled: CompiledProgram, program: StageProgram, graph: fx.Graph) -> int:
    """Run a graph of the stage on fake tensors and compare every result with its fact; its number of nodes."""
    training = compiled.source.traced_training and graph is program.graph
    shapes = {part.name: part for part in program.tensors}
    received = {port.name: port.value for port in program.receives}
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                break
            try:
                if node.op == "get_attr" and node.target == TRAINING:
                    values[node] = training
                else:
                    values[node] = _fake(node, values, compiled, program, shapes, received)
            except SnnpartError:
                raise
            except Exception as error:
                raise VerifyError(
                    f"it fails on the rank's local shapes: {error}", where=_where(node, program)
                ) from error
            _check_shape(node, values[node], program)
    return len(graph.nodes)


def _where(node: fx.Node, program: StageProgram) -> str:
    return f"{facts.place(node)}, {_rank(program)}"


def _fake(
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    compiled: CompiledProgram,
    program: StageProgram,
    shapes: Mapping[str, TensorSlice],
    received: Mapping[str, Value],
) -> Any:
    """The node's result as a fake tensor."""
    if node.op == "placeholder":
        return _fake_input(str(node.target), compiled, received)
    if node.op == "get_attr":
        part = shapes.get(str(node.target))
        if part is None:
            raise VerifyError(f"it reads '{node.target}', which this rank does not hold", where=_where(node, program))
        return _empty(part)
    if _is_taken_as_stated(node, values):
        return _stated(node)
    args = map_aggregate(node.args, lambda a: _on_meta(a, values))
    kwargs = map_aggregate(node.kwargs, lambda a: _on_meta(a, values))
    if node.op == "call_module":
        return _fake_leaf(node, program, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)  # type: ignore[index]
    return _fake_call(node, args, kwargs)  # type: ignore[arg-type]


def _fake_input(name: str, compiled: CompiledProgram, received: Mapping[str, Value]) -> Any:
    if name == BATCH_SIZE:
        return compiled.source.batch
    if name in received:
        return _empty(received[name])
    return _empty(next(info for info in compiled.source.inputs if info.name == name))


def _fake_leaf(node: fx.Node, program: StageProgram, args: Any, kwargs: Any) -> Any:
    module = program.leaves[str(node.target)].module
    found = adapter_for(module).infer(module, args, kwargs)
    return _stated(node) if found is NotImplemented else found


def _fake_call(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    target: Any = node.target
    if target in (ops.all_reduce, ops.grad_all_reduce):
        return args[0]
    if target in ops.COLLECTIVES:
        return _fake_collective(node, args[0], args[2], args[3])
    return target(*args, **kwargs)


def _fake_collective(node: fx.Node, x: Tensor, dim: int, pieces: Any) -> Tensor:
    """Gathered: the whole dim. Cut: what the node's fact states, which must be some rank's share."""
    if node.target is ops.all_gather:
        size = sum(stop - start for own in pieces for start, stop in own)
    else:
        shares = {sum(stop - start for start, stop in own) for own in pieces}
        stated = facts.need(node, Value).shape[dim]
        size = stated if stated in shares else -1
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _stated(node: fx.Node) -> Any:
    """The node's result as its facts state it."""
    value, values = facts.get(node, Value), facts.get(node, Values)
    return _made_of(value if value is not None else values)


def _made_of(stated: Any) -> Any:
    """What a fact states, nested results (an LSTM's) in tuples, with tensors for its `Value`s."""
    if isinstance(stated, Value):
        return _empty(stated)
    items = stated.items if isinstance(stated, Values) else stated
    is_fact = lambda item: item is not items and isinstance(item, (Value, Values))  # noqa: E731
    return pytree.tree_map(lambda item: _made_of(item) if is_fact(item) else item, items, is_leaf=is_fact)


def _empty(item: Any) -> Tensor:
    """A tensor without data with the shape and type of a fact, slice or input."""
    return torch.empty(item.shape, dtype=item.dtype, device="meta")


def _is_taken_as_stated(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Buffer writers, the user's functions, and what makes a tensor from numbers (it would be on a real device)."""
    if node.target in (ops.batch_norm, ops.batch_norm_copies, ops.assign, *TIME_OPS) or isinstance(
        node.target, (ops.Surrogate, Nested)
    ):
        return True
    works = any(not isinstance(values[n], (bool, int, float)) for n in node.all_input_nodes)
    return not works and facts.get(node, Value) is not None and node.op != "call_module"


def _on_meta(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return values[argument]
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _check_shape(node: fx.Node, made: Any, program: StageProgram) -> None:
    value = facts.get(node, Value)
    if value is None or not isinstance(made, Tensor):
        return
    if tuple(made.shape) != value.shape or made.dtype != value.dtype:
        raise VerifyError(
            f"it makes {str(made.dtype).removeprefix('torch.')}{list(made.shape)}, its fact states "
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
            where=_where(node, program),
        )
