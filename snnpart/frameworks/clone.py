"""Copy a leaf for a program: same class, same attributes, other tensors, no state.

`__init__` is not run (snnTorch's would put every copy into a class-level list for ever) and nothing is deep-copied
(state of an earlier forward would stop it). Plain attributes are shared or rebuilt: a bound method of the old module
(`self.state_function = self._base_sub`) becomes one of the new module.

Tensors hidden in plain attributes (Norse's `p.tau_mem_inv` in a NamedTuple) become parameters or buffers of a holder
module with the attribute's name, so that optimizers, DDP and FSDP2 see them under the user's path. Before each call a
hook puts the holder's present tensors, which FSDP2 swaps, back into the attribute.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from snnpart.frameworks.registry import adapter_for

_TORCH_SLOTS = frozenset(vars(nn.Module()))


def clone_leaf(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `module` that owns `tensors`, with its state reset.

    Args:
        tensors: dotted names relative to the leaf (`w`, `recurrent.weight`, `p.tau_mem_inv`) -> the copy's tensors,
            whole or slices, taken as they are. What is not named is cloned from the module.
    """
    twins = {id(old): object.__new__(type(old)) for old in module.modules()}
    for prefix, old in module.named_modules(remove_duplicate=False):
        new = twins[id(old)]
        if not vars(new):
            _copy_attributes(old, new, twins, tensors, prefix + "." if prefix else "")
    copy: nn.Module = twins[id(module)]
    for new in copy.modules():
        adapter_for(new).reset(new)
    return copy


def _copy_attributes(
    old: nn.Module, new: nn.Module, twins: Mapping[int, nn.Module], tensors: Mapping[str, Tensor], prefix: str
) -> None:
    attributes = vars(new)
    attributes.update({name: _rebind(value, twins) for name, value in vars(old).items()})
    attributes["_parameters"] = {
        name: None if value is None else _parameter(value, tensors.get(prefix + name), twins)
        for name, value in old._parameters.items()
    }
    attributes["_buffers"] = {
        name: None if value is None else tensors.get(prefix + name, value.detach().clone())
        for name, value in old._buffers.items()
    }
    attributes["_modules"] = {name: None if child is None else twins[id(child)] for name, child in old._modules.items()}
    for name, value in vars(old).items():
        if name not in _TORCH_SLOTS:
            _hold(new, name, value, tensors, prefix)


def _parameter(old: nn.Parameter, given: Tensor | None, twins: Mapping[int, nn.Module]) -> nn.Parameter:
    """The copy's parameter: the given tensor, with the hooks that rewrite the old parameter's gradient."""
    value = old.detach().clone() if given is None else given
    new = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=old.requires_grad)
    if new is not old:
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(_rebind(hook, twins))
    return new


def _rebind(value: Any, twins: Mapping[int, nn.Module]) -> Any:
    """The value with the old modules in it replaced by their twins; containers are copied, the rest is shared."""
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial):
        arguments = [_rebind(item, twins) for item in value.args]
        return functools.partial(_rebind(value.func, twins), *arguments, **_rebind(value.keywords, twins))
    if type(value) in (list, set):
        return type(value)(_rebind(item, twins) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _rebind(item, twins)) for key, item in value.items())
    if type(value) is tuple:
        return tuple(_rebind(item, twins) for item in value)
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _hold(new: nn.Module, name: str, value: Any, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Register the floating-point tensors inside a plain attribute under its name, and keep them in step with it."""
    inside = [(path, tensor) for path, tensor in _paths(value) if tensor.is_floating_point()]
    if not inside or isinstance(value, Tensor):
        return
    holder = nn.Module()
    for path, tensor in inside:
        given = tensors.get(f"{prefix}{name}.{path}", tensor.detach().clone())
        *parents, last = path.split(".")
        owner = functools.reduce(_child, parents, holder)
        if tensor.requires_grad:
            owner.register_parameter(last, given if isinstance(given, nn.Parameter) else nn.Parameter(given))
        else:
            owner.register_buffer(last, given, persistent=False)
    new._modules[name] = holder
    new.register_forward_pre_hook(_Refresh(name))
    _Refresh(name)(new, ())


def _child(module: nn.Module, name: str) -> nn.Module:
    if name not in module._modules:
        module.add_module(name, nn.Module())
    return module.get_submodule(name)


@dataclasses.dataclass(frozen=True)
class _Refresh:
    """Forward pre-hook: puts the holder's tensors into the plain attribute of the same name."""

    attribute: str

    def __call__(self, module: nn.Module, args: Any) -> None:
        holder = module._modules[self.attribute]
        assert holder is not None
        found = {**dict(holder.named_parameters()), **dict(holder.named_buffers())}
        held = vars(module)
        held[self.attribute] = _replace(held[self.attribute], found.get, "")


def _paths(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside the value with its dotted path."""
    if isinstance(value, Tensor):
        yield prefix, value
    for key, item in _items(value):
        yield from _paths(item, f"{prefix}.{key}" if prefix else key)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(field, getattr(value, field)) for field in value._fields]
    if isinstance(value, (tuple, list)):
        return [(str(index), item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return []


def _replace(value: Any, find: Callable[[str], Tensor | None], path: str) -> Any:
    """The value with each tensor replaced by what `find` has for its path."""
    if isinstance(value, Tensor):
        found = find(path)
        return value if found is None else found
    items = _items(value)
    if not items:
        return value
    new = {key: _replace(item, find, f"{path}.{key}" if path else key) for key, item in items}
    if isinstance(value, Mapping):
        return type(value)(zip(value, new.values(), strict=True))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(**new)
    if isinstance(value, (tuple, list)):
        return type(value)(new.values())
    return dataclasses.replace(value, **new)
