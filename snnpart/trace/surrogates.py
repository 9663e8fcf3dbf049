"""`autograd.Function` classes: `cls.apply(...)` becomes one node, `ops.Surrogate(cls)`, with the class's own backward.

`forward` of every class is wrapped, not `apply`: a reference bound early (`spike = Spike.apply`, the commonest idiom)
would miss a new `apply`, while torch looks `forward` up on the class at every call. Classes made while tracing are
wrapped when they are made.

Re-entrant `torch.utils.checkpoint` is a Function too, but its forward is the user's own code: it is traced through, so
that the state of neurons inside advances once. The helpers of the other kind leave no nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from snnpart import ops
from snnpart.compat import version
from snnpart.trace.cells import Call, How
from snnpart.trace.patches import patched
from snnpart.trace.recorder import Recorder

_CHECKPOINT = "torch.utils.checkpoint and saved-tensor hooks are traced through; their regions are not kept"


@contextmanager
def functions_recorded(recorder: Recorder) -> Iterator[None]:
    """Record `apply` of every autograd.Function class inside the block."""
    meta = type(Function)
    make = meta.__init__

    with ExitStack() as stack:

        def wrap(cls: Any) -> None:
            stack.enter_context(patched(_patches(recorder, cls)))

        def making(cls: Any, *args: Any, **kwargs: Any) -> None:
            make(cls, *args, **kwargs)
            wrap(cls)

        for cls in _subclasses(Function):
            wrap(cls)
        stack.enter_context(patched([(meta, "__init__", making)]))
        stack.enter_context(patched([(checkpoint.CheckpointFunction, "apply", _run_inline(recorder))]))
        stack.enter_context(patched([(saved_tensors_hooks, "__enter__", _noting_hooks(recorder))]))
        yield


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    waiting: list[Any] = [cls]
    while waiting:
        for sub in waiting.pop().__subclasses__():
            if sub not in seen:
                seen.add(sub)
                waiting.append(sub)
                yield sub


def _patches(recorder: Recorder, cls: Any) -> list[tuple[type, str, Any]]:
    """The wrapped `forward` of a class and, in the style that has one, its `setup_context`."""
    original = _own_forward(cls)
    if original is None or cls is checkpoint.CheckpointFunction:
        return []
    if cls.__module__ == checkpoint.__name__:
        return [(cls, "forward", staticmethod(_unrecorded(recorder, original)))]
    separate = cls.setup_context is not Function.setup_context
    found: list[tuple[type, str, Any]] = [(cls, "forward", staticmethod(_forward(recorder, cls, original, separate)))]
    if separate:
        found.append((cls, "setup_context", staticmethod(_unrecorded(recorder, cls.setup_context))))
    return found


def _own_forward(cls: Any) -> Callable[..., Any] | None:
    """The static forward that a class defines or inherits, before any wrapping; None when there is none."""
    found = getattr(cls, "forward", None)
    found = getattr(found, "_snnpart_original", found)
    return None if found is None or found is Function.forward else found


def _unrecorded(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def unrecorded(*args: Any, **kwargs: Any) -> Any:
        with recorder.pause(), recorder.fakes:
            return original(*args, **kwargs)

    return unrecorded


def _forward(recorder: Recorder, cls: type[Function], original: Callable[..., Any], separate: bool) -> Any:
    """`original` on fake tensors, recorded as one node. `separate`: the style with setup_context has no ctx here."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if recorder.paused:
            return original(*args, **kwargs)
        context, inputs = ((), args) if separate else (args[:1], args[1:])
        return _record(recorder, cls, original, context, inputs, kwargs)

    forward._snnpart_original = original  # type: ignore[attr-defined]
    return forward


def _record(
    recorder: Recorder, cls: type[Function], original: Callable[..., Any], context: tuple[Any, ...],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    with recorder.pause():
        fakes = tuple(recorder.fake(arg) if isinstance(arg, Tensor) else arg for arg in args)
        tensors = [arg for arg in fakes if isinstance(arg, Tensor)]
        versions = [version(tensor) for tensor in tensors]
    with recorder.unrecorded(), recorder.fakes:
        out = original(*context, *fakes, **kwargs)
    with recorder.pause():
        out = tuple(_own(item, tensors) for item in out) if isinstance(out, tuple) else _own(out, tensors)
        if any(version(tensor) != before for tensor, before in zip(tensors, versions, strict=True)):
            raise recorder.error(f"{cls.__qualname__}.forward writes into its inputs", "return a new tensor instead")
        call = Call(How("apply", (), {}), tensors, out, False)
        recorder.emit("call_function", ops.Surrogate(cls), fakes, kwargs, call)
        for item in out if isinstance(out, tuple) else (out,):
            if isinstance(item, Tensor):
                recorder.from_function(item, tensors)
    return out


def _own(item: Any, inputs: list[Tensor]) -> Any:
    """A result that is an input itself becomes a tensor of its own, as apply would make it."""
    return item.clone() if isinstance(item, Tensor) and any(item is one for one in inputs) else item


def _noting_hooks(recorder: Recorder) -> Any:
    """Entering saved-tensor hooks, which the other kind of checkpoint is made of, is noted."""
    original = saved_tensors_hooks.__enter__

    def __enter__(hooks: Any) -> Any:
        if not recorder.paused:
            recorder.assume("checkpoint", _CHECKPOINT)
        return original(hooks)

    return __enter__


def _run_inline(recorder: Recorder) -> Any:
    """`CheckpointFunction.apply` that runs the code; as there, no gradient without an input that has one."""

    def apply(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        recorder.assume("checkpoint", _CHECKPOINT)
        needed = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            return run(*args)

    return staticmethod(apply)
