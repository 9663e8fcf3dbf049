"""Recording a call that writes in place: the twin's node becomes the value of the written tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from snnpart import ops
from snnpart.trace import writes
from snnpart.trace.cells import Called, How
from snnpart.trace.recorder import Recorder
from snnpart.trace.writes import Twin

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def write(recorder: Recorder, called: Called, written: Any, run: Run) -> Any:
    """Record the write and carry it out on the fakes; `run` runs a function on them."""
    if called.name in writes.REFUSED or not isinstance(written, Tensor):
        raise recorder.error(f"'{called.name}' cannot be held in a graph", "make a new tensor instead")
    recorder.settle(written)
    if called.name in writes.METADATA:
        return _change_shape(recorder, called, written, run)
    node = _value(recorder, called, written, run)
    detached = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in called.inputs)
    out = run(called.function, called.args, called.kwargs)
    if detached and not written.requires_grad and written.is_floating_point():
        recorder.mark(node, written, requires_grad=True)
        node = recorder.graph.call_function(torch.detach, (node,))
    recorder.write(written, node)
    return out


def _change_shape(recorder: Recorder, called: Called, written: Tensor, run: Run) -> Tensor:
    method, rest = called.name[:-1], called.args[1:]
    node = recorder.graph.call_method(method, (recorder.node(written), *rest), called.kwargs)
    with torch.no_grad():
        before = written.detach()
    run(called.function, called.args, called.kwargs)
    recorder.reshaped(written, before, node, How(called.name, rest, called.kwargs))
    return written


def _value(recorder: Recorder, called: Called, written: Tensor, run: Run) -> fx.Node:
    """The node of what the tensor holds after the write."""
    if called.name == "__setitem__":
        return recorder.graph.call_function(ops.index_assign, tuple(map(recorder.argument, called.args)))
    if called.name == "copy_":
        return _copied(recorder, written, called.args[1] if len(called.args) > 1 else called.kwargs["src"], run)
    twin = writes.filled(called, written) or writes.twin_of(called)
    dtype = _dtype_of(twin, run) if twin else None
    if twin is None or dtype is None:
        return _on_a_clone(recorder, called, written)
    kwargs = {key: recorder.argument(value) for key, value in twin.kwargs.items()}
    node = recorder.graph.create_node(twin.op, twin.target, tuple(map(recorder.argument, twin.args)), kwargs)
    if dtype == written.dtype:
        return node
    recorder.mark(node, written.to(dtype))
    return recorder.graph.call_method("to", (node, written.dtype))


def _dtype_of(twin: Twin, run: Run) -> torch.dtype | None:
    """The dtype of the twin's result; None when the twin does not take these arguments."""
    try:
        with torch.no_grad():
            result = run(twin.function, twin.args, twin.kwargs)
    except (RuntimeError, TypeError):
        return None
    return result.dtype if isinstance(result, Tensor) else None


def _on_a_clone(recorder: Recorder, called: Called, written: Tensor) -> fx.Node:
    """The in-place method itself, on a clone that nobody else sees."""
    if not hasattr(torch.Tensor, called.name):
        raise recorder.error(f"'{called.name}' writes in place, and has no other form", "make a new tensor instead")
    clone = recorder.graph.call_function(torch.clone, (recorder.node(written),))
    recorder.mark(clone, written)
    rest = tuple(map(recorder.argument, called.args[1:]))
    kwargs = {key: recorder.argument(value) for key, value in called.kwargs.items()}
    return recorder.graph.call_method(called.name, (clone, *rest), kwargs)


def _copied(recorder: Recorder, written: Tensor, source: Tensor, run: Run) -> fx.Node:
    """The value of `written.copy_(source)`: the source on the device, in the dtype and of the shape of the target."""
    node, made = recorder.node(source), source
    for method, args in (("to", (written.device,)), ("to", (written.dtype,)), ("expand", tuple(written.shape))):
        with torch.no_grad():
            now = run(getattr(torch.Tensor, method), (made, *args), {})
        if now is not made and (method == "to" or now.shape != made.shape):
            node = recorder.graph.call_method(method, (node, *args))
            recorder.mark(node, now, source.requires_grad)
        made = now
    return node
