"""trace(): the whole way from a module and example inputs to a `SpikeGraph`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx, nn

from snnpart import facts
from snnpart.errors import ConfigError, TraceError
from snnpart.facts import Value
from snnpart.frameworks import is_leaf
from snnpart.graph import Assumption, OutputInfo, SpikeGraph, TensorInfo, output_node
from snnpart.trace import batches
from snnpart.trace.batches import BatchMatters
from snnpart.trace.calls import ExampleCall, example_call
from snnpart.trace.session import Recording, Request, record


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

    Raises:
        ConfigError: a bad argument.
        TraceError: the module does something that no graph can hold; the message has its line.
    """
    _check(model, time_steps)
    call = example_call(model, example_inputs, in_dims, time_dims)
    _check_time(call, time_steps)
    request = Request(model, call, training, time_steps, reset)
    recording, fixed = _record_for_all_batches(request)
    batch = call.batch if call.batch is not None else 1
    assumptions = recording.assumptions + _further_assumptions(model, call, recording, fixed)
    return SpikeGraph(
        name=name or type(model).__name__,
        graph=recording.graph,
        tensors=_tensors(recording),
        leaves=recording.leaves,
        inputs=call.infos,
        outputs=_outputs(recording, out_dims, batch, fixed),
        in_spec=call.spec,
        out_spec=recording.out_spec,
        out_constants=recording.out_constants,
        batch=batch,
        batch_fixed=fixed,
        time_steps=time_steps,
        traced_training=training,
        training_specialised=recording.specialised,
        states=recording.states,
        assumptions=assumptions,
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
                f"input '{info.name}' has {info.shape[info.time_dim]} steps in dim {info.time_dim}, time_steps={time_steps}",
                fix="give as many steps as the input has",
            )


def _record_for_all_batches(request: Request) -> tuple[Recording, str]:
    """A recording that holds for every batch size, or one for the example's with the reason why it is fixed."""
    batch = request.call.batch
    if batch is None:
        return record(request, None), "no input has a batch dim"
    sizes = _other_sizes(request.call, batch)
    first = record(request, batch if batch > 1 else next(sizes))
    try:
        second = record(request, next(sizes))
    except TraceError as error:
        return _fixed(request, first, batch, f"forward fails with another batch size: {error}")
    try:
        if batches.merge(first, second):
            batches.agrees(first, record(request, next(sizes)))
    except (BatchMatters, TraceError) as error:
        return _fixed(request, first, batch, str(error))
    if first.batch != batch:
        batches.shift(first, batch)
    return first, ""


def _other_sizes(call: ExampleCall, batch: int) -> Any:
    """Batch sizes of at least 2 that no dim of the inputs has."""
    taken = call.sizes() | {batch}
    return iter([n for n in range(2, 2 * len(taken) + 12) if n not in taken])


def _fixed(request: Request, first: Recording, batch: int, reason: str) -> tuple[Recording, str]:
    """The example's batch size only. The recording is made anew: the one at hand may be half merged."""
    return record(request, batch), reason


def _further_assumptions(
    model: nn.Module, call: ExampleCall, recording: Recording, fixed: str
) -> tuple[Assumption, ...]:
    found = [Assumption("constant", f"the input {value!r} is the same in every call") for value in call.constants]
    if fixed:
        found.append(Assumption("batch", f"the batch size is fixed: {fixed}"))
    if not any(leaf.neuron for leaf in recording.leaves.values()) and not _spikes(recording.graph):
        found.append(Assumption("neuron", "no spiking neuron was found"))
    return tuple(found)


def _spikes(graph: fx.Graph) -> bool:
    """Whether there is a surrogate gradient: a hand-written neuron."""
    from snnpart.ops import Surrogate

    return any(isinstance(node.target, Surrogate) for node in graph.nodes)


def _tensors(recording: Recording) -> dict[str, TensorInfo]:
    read = {node.target for node in recording.graph.nodes if node.op == "get_attr"}
    tensors = {}
    for root in recording.roots.values():
        leaf = root.leaf if root.leaf in recording.leaves else None
        used = root.name in read or leaf is not None
        if root.registered or used:
            tensors[root.name] = TensorInfo(
                root.name, root.kind, root.tensor, root.persistent, root.registered, tuple(root.aliases), leaf, used
            )
    return tensors


def _outputs(recording: Recording, out_dims: Any, batch: int, fixed: str) -> tuple[OutputInfo, ...]:
    nodes = output_node(recording.graph).args[0]
    names = recording.output_names
    given = _given(out_dims, len(names))
    return tuple(
        OutputInfo(name, _batch_dim(name, facts.need(node, Value), dim, out_dims is not None, batch, fixed))  # type: ignore[arg-type]
        for name, node, dim in zip(names, nodes, given, strict=True)  # type: ignore[arg-type]
    )


def _given(out_dims: Any, count: int) -> tuple[Any, ...]:
    if out_dims is None or isinstance(out_dims, int):
        return (out_dims,) * count
    dims = tuple(out_dims)
    if len(dims) != count:
        raise ConfigError(f"out_dims has {len(dims)} entries for {count} tensor outputs", fix=f"give {count}, or one for all")
    return dims


def _batch_dim(name: str, value: Value, given: int | None, is_given: bool, batch: int, fixed: str) -> int | None:
    if is_given:
        if given is not None and not -len(value.shape) <= given < len(value.shape):
            raise ConfigError(f"out_dims={given} is outside the {len(value.shape)} dims of '{name}', shape {value.shape}")
        return None if given is None else given % max(1, len(value.shape))
    sizes = [dim for dim, size in enumerate(value.shape) if size == batch] if fixed else []
    found = sizes or [dim for dim, slope in enumerate(value.slopes) if slope == 1]
    if len(found) > 1:
        raise TraceError(
            f"dims {found} of '{name}', shape {value.shape}, may each be the batch", fix="say which with out_dims="
        )
    return found[0] if found else None


def renamed(graph: SpikeGraph, name: str) -> SpikeGraph:
    """The same graph under another name."""
    return replace(graph, name=name)
