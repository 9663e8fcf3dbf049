"""Copy a leaf for a program: same class, same attributes, other tensors, no state.

`__init__` is not run (snnTorch's would put every copy into a class-level list for ever) and nothing is deep-copied
(state of an earlier forward would stop it). Plain attributes are shared or rebuilt: a bound method of the old module
(`self.state_function = self._base_sub`) becomes one of the new module.

Tensors hidden in plain attributes (Norse's `p.tau_mem_inv` in a NamedTuple) become parameters or buffers of a holder
module with the attribute's name, so that optimizers, DDP and FSDP2 see them under the user's path. Before each call a
hook puts the holder's present tensors, which FSDP2 swaps, back into the attribute.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.compat import gradient_hooks
from snnpart.frameworks.registry import adapter_for

TORCH_SLOTS = frozenset(vars(nn.Module()))


def clone_leaf(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `module` that owns `tensors`, with its state reset.

    Args:
        tensors: dotted names relative to the leaf (`w`, `recurrent.weight`, `p.tau_mem_inv`) -> the copy's tensors,
            whole or slices, taken as they are. What is not named is cloned from the module; a tensor with several names
            needs one of them.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return _clone_script(module, tensors)
    twins = {id(old): object.__new__(type(old)) for old in module.modules()}
    owned = _owned(module, tensors, twins)
    for prefix, old in module.named_modules():
        _copy_attributes(old, twins[id(old)], twins, owned)
        hold_tensors(twins[id(old)], tensors, prefix + "." if prefix else "")
    made: nn.Module = twins[id(module)]
    settle(made)
    return made


def settle(module: nn.Module) -> None:
    """Finish a module that was made without its constructor: what it derives from its tensors, and its state."""
    for part in list(module.modules()):
        adapter = adapter_for(part)
        adapter.finish(part)
        adapter.reset(part)


def _clone_script(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A ScriptModule lives outside Python: torch copies it, and the tensors are set on the copy."""
    made = copy.deepcopy(module)
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, made), last, tensor)
    return made


def _owned(module: nn.Module, tensors: Mapping[str, Tensor], twins: Mapping[int, nn.Module]) -> dict[int, Tensor]:
    """Every registered tensor of the old module by identity -> the copy's. Tied ones stay tied."""
    registered = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    named = {id(old): tensors[name] for name, old in registered if name in tensors}
    owned: dict[int, Tensor] = {}
    for _, old in registered:
        if id(old) in owned:
            continue
        value = named[id(old)] if id(old) in named else old.detach().clone()
        owned[id(old)] = _parameter(old, value, twins) if isinstance(old, nn.Parameter) else value
    return owned


def _copy_attributes(
    old: nn.Module, new: nn.Module, twins: Mapping[int, nn.Module], owned: Mapping[int, Tensor]
) -> None:
    state = adapter_for(old).transient_names(old)
    attributes = vars(new)
    attributes.update({name: _rebind(value, twins) for name, value in vars(old).items() if name not in state})
    attributes["_parameters"] = {n: None if p is None else owned[id(p)] for n, p in old._parameters.items()}
    attributes["_buffers"] = {n: None if b is None else owned[id(b)] for n, b in old._buffers.items()}
    attributes["_modules"] = {n: None if m is None else twins[id(m)] for n, m in old._modules.items()}


def _parameter(old: nn.Parameter, value: Tensor, twins: Mapping[int, nn.Module]) -> nn.Parameter:
    """The copy's parameter, with the hooks that rewrite the old parameter's gradient, each once: another holder of the
    parameter may have brought them."""
    new = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=old.requires_grad)
    if new is not old and new.requires_grad:
        there = gradient_hooks(new)
        for hook in gradient_hooks(old):
            if hook not in there:
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
    if type(value) in (list, set, tuple):
        return type(value)(_rebind(item, twins) for item in value)
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update((key, _rebind(item, twins)) for key, item in value.items())
        return twin
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def hold_tensors(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Register the floating-point tensors in the module's plain attributes, those of `tensors` where it names them.

    Integers stay plain: they are sizes. So do constants of a module that takes every buffer for its state.
    """
    learned_only = adapter_for(module).buffers_are_state
    for name, value in list(vars(module).items()):
        if name in TORCH_SLOTS:
            continue
        inside = {
            path: _given(tensors, f"{prefix}{name}.{path}" if path else prefix + name, tensor)
            for path, tensor in _paths(value)
            if tensor.is_floating_point() and (tensor.requires_grad or not learned_only)
        }
        if list(inside) == [""]:
            del vars(module)[name]
            _register(module, name, value, inside[""])
        elif inside:
            _hold(module, name, value, inside)


def _given(tensors: Mapping[str, Tensor], name: str, old: Tensor) -> Tensor:
    return tensors[name] if name in tensors else old.detach().clone()


def _hold(module: nn.Module, name: str, value: Any, inside: Mapping[str, Tensor]) -> None:
    """Put tensors inside a plain attribute into a holder of its name, and keep the attribute in step with it."""
    holder = nn.Module()
    for path, old in _paths(value):
        if path in inside:
            *parents, last = path.split(".")
            _register(functools.reduce(_child, parents, holder), last, old, inside[path])
    module._modules[name] = holder
    if Refresh(name) not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(Refresh(name))
    Refresh(name)(module, ())


def _register(owner: nn.Module, name: str, old: Tensor, value: Tensor) -> None:
    """Make the tensor a parameter of `owner` if it learns, else a buffer that no checkpoint holds."""
    if old.requires_grad:
        owner.register_parameter(name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))
    else:
        owner.register_buffer(name, value, persistent=False)


def _child(module: nn.Module, name: str) -> nn.Module:
    if name not in module._modules:
        module.add_module(name, nn.Module())
    return module.get_submodule(name)


@dataclasses.dataclass(frozen=True)
class Refresh:
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
