"""trace(): the whole way from a module and example inputs to a `SpikeGraph`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch import fx, nn

from snnpart import facts, ops
from snnpart.collector import collector_paused
from snnpart.errors import ConfigError, TraceError
from snnpart.facts import Value
from snnpart.frameworks import is_leaf
from snnpart.graph import Assumption, BatchGuard, OutputInfo, SpikeGraph, TensorInfo, output_node
from snnpart.trace import batches
from snnpart.trace.batches import BatchMatters
from snnpart.trace.calls import ExampleCall, example_call
from snnpart.trace.session import Recording, Request, record

_USUAL_BATCHES = (*range(1, 257), 10_000)


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    in_dims: Any = None,
    out_dims: Any = None,
    time_dims: Any = None,
    time_steps: int | None = None,
    training: bool = True,
    reset: Callable[[nn.Module], Any] | None = None,
    name: str | None = None,
    opened: Collection[str] = (),
) -> SpikeGraph:
    """The network as a graph. The module is run on tensors without data, and left exactly as it was.

    Args:
        model: any module; its parameters, buffers and neuron layers are read, not copied.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. Only shapes count.
        in_dims: batch dim of the tensor inputs, one for all or one each (None: no batch). Default 0.
        out_dims: batch dim of the tensor outputs likewise. Default: found by tracing with two batch sizes.
        time_dims: dim of the inputs that carries T, one for all or one each (None: no time).
        time_steps: call a single-step module this many times; outputs are stacked over time at dim 0.
        training: the mode that `self.training` answers with where the code branches on it.
        reset: the user's own way to reset the model's state, called as `reset(model)`.
        name: the graph's name. Default: the class.
        opened: paths of leaves that are traced through (see `Adapter.holds_matrix`).

    Raises:
        ConfigError: a bad argument.
        TraceError: the module does something that no graph can hold; the message has its line.
    """
    _check(model, time_steps)
    call = example_call(model, example_inputs, in_dims, time_dims)
    _check_time(call, time_steps)
    request = Request(model, call, training, time_steps, reset, frozenset(opened))
    with collector_paused():
        traced = _record_for_all_batches(request)
    recording, batch = traced.recording, call.batch if call.batch is not None else 1
    return SpikeGraph(
        name=name or type(model).__name__,
        graph=recording.graph,
        tensors=_tensors(recording),
        leaves=recording.leaves,
        inputs=call.infos,
        outputs=_outputs(traced, out_dims, batch),
        in_spec=call.spec,
        out_spec=recording.out_spec,
        out_constants=recording.out_constants,
        batch=batch,
        batch_fixed=traced.fixed,
        time_steps=time_steps,
        traced_training=training,
        training_specialised=recording.specialised,
        states=recording.states,
        guards=traced.guards,
        assumptions=recording.assumptions + _further_assumptions(call, traced),
        notes=_other_names(model, recording),
    )


def _check(model: Any, time_steps: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}, not a torch.nn.Module",
            fix="pass the module itself (call a factory first, not the factory)",
        )
    if is_leaf(model):
        raise ConfigError(
            f"the model is a single {type(model).__name__}, which stays whole in a graph",
            fix="put it into a module, for example nn.Sequential(model)",
        )
    if time_steps is not None and (not isinstance(time_steps, int) or time_steps < 1):
        raise ConfigError(f"time_steps={time_steps!r} is not a positive number of steps")


def _check_time(call: ExampleCall, time_steps: int | None) -> None:
    if time_steps is None:
        return
    for info in call.infos:
        if info.time_dim is not None and info.shape[info.time_dim] != time_steps:
            raise ConfigError(
                f"input '{info.name}' has {info.shape[info.time_dim]} steps in dim {info.time_dim}, "
                f"time_steps={time_steps}",
                fix="give as many steps as the input has",
            )


@dataclass(frozen=True)
class Traced:
    """A recording that holds for every batch size, or for the example's only, for the reason in `fixed`.

    `batch_dims` are the dims of each output that grow as the batch does; None when that could not be seen.
    """

    recording: Recording
    fixed: str = ""
    batch_dims: tuple[tuple[int, ...], ...] | None = None
    guards: tuple[BatchGuard, ...] = ()


def _record_for_all_batches(request: Request) -> Traced:
    """Record at two batch sizes and merge; at a third where a size has an offset."""
    batch = request.call.batch
    first = record(request, batch)
    if batch is None:
        return Traced(first, "no input has a batch dim", ((),) * len(first.output_names))
    sizes = _other_sizes(request.call, batch)
    try:
        request, first, second = _two(request, first, next(sizes))
    except TraceError as error:
        _refuse_carried(first)
        return Traced(first, f"forward fails with another batch size: {error}")
    dims = batches.growing(first, second)
    try:
        offsets, guards = batches.merge(first, second)
        if offsets:
            batches.agrees(first, record(request, next(sizes)))
    except (BatchMatters, TraceError) as error:
        # made anew: the one at hand may hold sizes that depend on the batch
        return Traced(record(request, batch), str(error), dims)
    return Traced(first, "", dims, guards)


def _two(request: Request, first: Recording, other: int) -> tuple[Request, Recording, Recording]:
    """The recordings at both batch sizes, in which the same buffers are state, and how they were made.

    A buffer may hold the tensor of an earlier window. One size takes it for a stored tensor, another shows what it is:
    its shape changes, or forward fails until the buffer is reset.
    """
    try:
        second = record(request, other)
    except TraceError:
        if not first.held:
            raise
        request = replace(request, states=first.held)
        second = record(request, other)
    if first.buffers != second.buffers:
        request = replace(request, states=request.states | first.buffers | second.buffers)
        first, second = record(request, first.batch), record(request, other)
    return request, first, second


def _refuse_carried(recording: Recording) -> None:
    """State that has the example's batch size before forward, in a module that fails at another, is an old window's."""
    for slot in recording.carried:
        raise TraceError(
            f"attribute '{slot.name}' holds a {slot.initial} of an earlier forward",
            where=f"module '{slot.module}'",
            fix="give the module a reset() without arguments, or pass reset=f, called as f(model)",
        )


def _other_sizes(call: ExampleCall, batch: int) -> Iterator[int]:
    """Batch sizes of at least 2 that no dim of the inputs has."""
    taken = call.sizes() | {batch}
    return (n for n in count(2) if n not in taken)


def _further_assumptions(call: ExampleCall, traced: Traced) -> tuple[Assumption, ...]:
    recording = traced.recording
    found = [Assumption("constant", f"the input {value!r} is the same in every call") for value in call.constants]
    for guard in traced.guards:
        if not all(guard.at(size) for size in _USUAL_BATCHES):
            found.append(Assumption("branch", f"the code compares the batch size N: {guard}", guard.place))
    if traced.fixed:
        found.append(Assumption("batch", f"the batch size is fixed: {traced.fixed}"))
    if not any(leaf.neuron for leaf in recording.leaves.values()) and not _spikes(recording.graph):
        found.append(Assumption("neuron", "no spiking neuron was found"))
    return tuple(found)


def _spikes(graph: fx.Graph) -> bool:
    """Whether there is a surrogate gradient: a hand-written neuron."""
    return any(isinstance(node.target, ops.Surrogate) for node in graph.nodes)


def _other_names(model: nn.Module, recording: Recording) -> dict[str, str]:
    """For each leaf that the model reaches under several paths, the others."""
    found: dict[str, str] = {}
    first = {id(leaf.module): path for path, leaf in recording.leaves.items()}
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.get(id(module), path)
        if known != path:
            key = f"other names of {known}"
            found[key] = f"{found[key]}, {path}" if key in found else path
    return found


def _tensors(recording: Recording) -> dict[str, TensorInfo]:
    read = {node.target for node in recording.graph.nodes if node.op == "get_attr"}
    tensors = {}
    for root in recording.roots.values():
        leaf = root.leaf if root.leaf in recording.leaves else None
        used = root.name in read or any(_is_inside(name, recording.leaves) for name in (root.name, *root.aliases))
        if root.registered or used:
            tensors[root.name] = TensorInfo(
                root.name,
                root.kind,
                root.tensor,
                root.persistent,
                root.registered,
                tuple(root.aliases),
                leaf,
                used,
                tuple(root.plain),
            )
    return tensors


def _is_inside(name: str, leaves: Collection[str]) -> bool:
    """Whether a tensor of this name lies inside one of the leaves."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in leaves for i in range(1, len(parts)))


def _outputs(traced: Traced, out_dims: Any, batch: int) -> tuple[OutputInfo, ...]:
    names = traced.recording.output_names
    (nodes,) = output_node(traced.recording.graph).args
    values = [facts.need(node, Value) for node in nodes]  # type: ignore[union-attr, arg-type]
    if out_dims is not None:
        given = _given(out_dims, len(names))
        return tuple(OutputInfo(*pair) for pair in zip(names, map(_checked, names, values, given), strict=True))
    seen = traced.batch_dims or [tuple(dim for dim, size in enumerate(v.shape) if size == batch) for v in values]
    return tuple(OutputInfo(*pair) for pair in zip(names, map(_only, names, values, seen), strict=True))


def _given(out_dims: Any, count: int) -> tuple[int | None, ...]:
    if isinstance(out_dims, int):
        return (out_dims,) * count
    dims = tuple(out_dims)
    if len(dims) != count:
        what = f"out_dims has {len(dims)} entries for {count} tensor outputs"
        raise ConfigError(what, fix=f"give {count}, or one for all")
    return dims


def _checked(name: str, value: Value, dim: int | None) -> int | None:
    rank = len(value.shape)
    if dim is not None and not -rank <= dim < rank:
        raise ConfigError(f"out_dims={dim} is outside the {rank} dims of '{name}', shape {value.shape}")
    return None if dim is None else dim % rank


def _only(name: str, value: Value, dims: tuple[int, ...]) -> int | None:
    if len(dims) > 1:
        raise TraceError(
            f"dims {list(dims)} of '{name}', shape {value.shape}, may each be the batch", fix="say which with out_dims="
        )
    return dims[0] if dims else None
