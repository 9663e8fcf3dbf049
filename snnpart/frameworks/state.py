"""State of a network's modules: put it back to the start, or put everything back as it was.

`reset_state` starts a window: neurons of frameworks through their adapters, and modules of the user's own that still
hold tensors of an earlier forward, in attributes or in buffers, through their own `reset`-like method. A parameter is
never changed by a reset: a method named `reset` that initialises weights is undone.

`preserved` is for everything that runs the user's module (tracing, the gate): on leaving the block, also by an error,
every attribute, buffer value, gradient, hook and flag of every module is what it was. Values of parameters are not
saved (no forward changes them) but their `grad` and `requires_grad` are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.compat import version
from snnpart.errors import TraceError
from snnpart.frameworks.adapter import Adapter, tensors_in
from snnpart.frameworks.registry import adapter_for, adapters
from snnpart.frameworks.torch_opaque import TorchAdapter

_RESETS = ("reset", "reset_state", "reset_states", "reset_mem")
_TORCH_SLOTS = frozenset(vars(nn.Module()))


def reset_state(
    model: nn.Module, reset: Callable[[nn.Module], Any] | None = None, buffers: Collection[str] = ()
) -> None:
    """Put the state of every module of `model` back to its start.

    Args:
        reset: the user's own way, called as `reset(model)` instead of all else.
        buffers: names of buffers known to hold state, so that the modules that own them are reset too.

    A module that has no method to drop what an earlier forward left keeps it: forward may replace it unread, and the
    tracer refuses to read it.
    """
    if reset is not None:
        reset(model)
        return
    for module in model.modules():
        adapter_for(module).reset(module)
    keepers = {name.rpartition(".")[0] for name in buffers}
    for path, module in reversed(list(model.named_modules())):
        stale = _own(module) and any(_stale(child) for child in module.modules() if _own(child))
        if stale or _holds_tensors(module) or path in keepers or _holds_window(module):
            _call_reset(module)


def _own(module: nn.Module) -> bool:
    """Whether the module is the user's own, so that no adapter resets it."""
    adapter: Adapter = adapter_for(module)
    return isinstance(adapter, TorchAdapter) or type(module).__module__.partition(".")[0] != adapter.package


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _TORCH_SLOTS)


def _stale(module: nn.Module) -> bool:
    """Whether an attribute or buffer carries an earlier forward's autograd graph."""
    made_before_each_call = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # weight_norm
    held = [(n, v) for n, v in (*_plain(module), *module._buffers.items()) if n not in made_before_each_call]
    return any(t.grad_fn is not None for _, value in held for t in tensors_in(value))


def _holds_tensors(module: nn.Module) -> bool:
    return _own(module) and any(True for _, value in _plain(module) for _ in tensors_in(value))


def _holds_window(module: nn.Module) -> bool:
    """Whether the module's own reset would give one of its buffers another shape: it holds the state of some batch."""
    if not module._buffers or not _own(module) or _reset_of(module) is None:
        return False
    before = {name: buffer.shape for name, buffer in module._buffers.items() if buffer is not None}
    with preserved(module):
        _call_reset(module)
        after = {name: buffer.shape for name, buffer in module._buffers.items() if buffer is not None}
    return after != before


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The module's own `reset`-like method."""
    return next((m for name in _RESETS if callable(m := getattr(module, name, None)) and _no_arguments(m)), None)


def _call_reset(module: nn.Module) -> None:
    method = _reset_of(module)
    if method is None:
        return
    before = {p: (version(p), p.detach().clone()) for p in module.parameters(recurse=False)}
    method()
    with torch.no_grad():
        for parameter, (writes, value) in before.items():
            if version(parameter) != writes:
                parameter.copy_(value)


def _no_arguments(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put every module of `model` back exactly as it was when the block is left, also by an error.

    What forward does to all layers of a framework in the process reaches those of `model` only.

    Raises:
        TraceError: a parameter is an inference tensor, through which no gradient goes.
    """
    _refuse_inference_parameters(model)
    modules = list(model.modules())
    attributes = [(module, dict(vars(module))) for module in modules]
    containers = [(c, _copy(c)) for _, saved in attributes for c in saved.values() if _is_container(c)]
    tensors = _written_tensors(modules)
    values = [(t, version(t), t.detach().clone()) for t in tensors]
    flags = [(t, t.requires_grad, t.grad) for t in (*model.parameters(), *tensors) if t.is_leaf]
    try:
        with ExitStack() as stack:
            for adapter in adapters():
                stack.enter_context(adapter.confined(model))
            yield
    finally:
        for module, saved in attributes:
            vars(module).clear()
            vars(module).update(saved)
        for container, content in containers:
            _refill(container, content)
        for tensor, writes, value in values:
            _put_back(tensor, writes, value)
        for tensor, requires_grad, grad in flags:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = grad


def _refuse_inference_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise TraceError(
                f"parameter '{name}' was made inside torch.inference_mode(), so that it can have no gradient",
                where=f"module '{name.rpartition('.')[0]}'",
                fix="make the model outside torch.inference_mode()",
            )


def _is_container(value: Any) -> bool:
    return isinstance(value, (MutableMapping, list, set))


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, MutableMapping) else type(container)(container)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _written_tensors(modules: list[nn.Module]) -> list[Tensor]:
    """Every tensor that a forward may write into: buffers, and tensors in plain attributes."""
    found = {
        id(tensor): tensor
        for module in modules
        for value in (module._buffers, *(value for _, value in _plain(module)))
        for tensor in tensors_in(value)
        if not isinstance(tensor, nn.Parameter)
    }
    return list(found.values())


def _put_back(tensor: Tensor, writes: int, value: Tensor) -> None:
    # BatchNorm updates its running statistics without counting it as a write, so values decide
    if tensor.is_meta and tensor.shape == value.shape:
        return
    if version(tensor) == writes and tensor.shape == value.shape and torch.equal(tensor, value):
        return
    if tensor.grad_fn is not None and not tensor._is_view():
        tensor.detach_()
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.set_(value) if tensor.shape != value.shape else tensor.copy_(value)  # type: ignore[call-overload]
