"""A leaf as JSON data without pickle, and back.

What is written: the class by its import path, plain attributes, submodules, and tensors by name only (their values are
the weights file's; small tensors in plain attributes are written out too). A closure such as snnTorch's
`fast_sigmoid(slope=25)` is written as the function that made it, the place of the inner function in it, and the values
of its cells. State is not written: a leaf comes back reset.

Reading imports classes and functions of the allowed packages and builds objects without calling their constructors; no
other code runs. See `decode` for that half.

    value           written as
    None, bool, int, str, finite float    itself
    list            a JSON list
    other           {"kind": ..., ...}
"""

from __future__ import annotations

import enum
import functools
import importlib
import math
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.compat import MODULE_HOOKS, gradient_hooks
from snnpart.errors import CheckpointError
from snnpart.frameworks.clone import TORCH_SLOTS, Refresh
from snnpart.frameworks.registry import adapter_for

SMALL = 64


def encode_leaf(module: nn.Module) -> dict[str, Any]:
    """The module as JSON data; `decode_leaf` makes it again with the tensors of a weights file.

    Raises:
        CheckpointError: an attribute, hook or class that cannot be written; it names module and attribute.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    return _module(module, _Where(f"neuron layer of class {type(module).__qualname__}", paths, names, ""))


def encode_hooks(parameter: Tensor, name: str) -> list[Any]:
    """The gradient hooks of a parameter that belongs to no leaf, as JSON data.

    Raises:
        CheckpointError: a hook that cannot be written; it names the parameter.
    """
    where = _Where("gradient hook", {}, {}, name)
    return [encode(hook, where) for hook in gradient_hooks(parameter)]


@dataclass(frozen=True)
class _Where:
    """Where a value stands: in what, paths of its modules, names of its tensors, the value's dotted name."""

    owner: str
    paths: Mapping[int, str]
    tensors: Mapping[int, str]
    name: str

    def at(self, name: str) -> _Where:
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def refuse(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"'{self.name}' {what}",
            where=self.owner,
            fix="use a class or function that can be imported by name, or plain data",
        )


def _module(module: nn.Module, where: _Where) -> dict[str, Any]:
    if isinstance(module, torch.jit.ScriptModule):
        raise where.refuse("is a ScriptModule, which has no class that can be imported")
    for slot in MODULE_HOOKS:
        if any(not isinstance(hook, Refresh) for hook in vars(module)[slot].values()):
            raise where.refuse(f"has hooks ({slot.strip('_')}), which a saved program cannot hold")
    # what `hold_tensors` adds to a copy is left out here and added again on reading
    held = {hook.attribute for hook in module._forward_pre_hooks.values() if isinstance(hook, Refresh)}
    state = adapter_for(module).transient_names(module)
    plain = {n: value for n, value in vars(module).items() if n not in TORCH_SLOTS and n not in state}
    few = adapter_for(module).buffers_are_state
    loose = {n: value for n, value in plain.items() if isinstance(value, Tensor) and value.is_floating_point()}
    loose = {n: value for n, value in loose.items() if value.requires_grad or not few}
    learned = {n: nn.Parameter(value) for n, value in loose.items() if value.requires_grad}
    buffers = {**module._buffers, **{n: value for n, value in loose.items() if n not in learned}}
    kept = buffers.keys() - loose.keys() - module._non_persistent_buffers_set
    return {
        "class": import_path(type(module), where),
        "training": module.training,
        "parameters": {n: _parameter(p, where.at(n)) for n, p in {**module._parameters, **learned}.items()},
        "buffers": {n: _buffer(b, n in kept, n in state, where.at(n)) for n, b in buffers.items()},
        "modules": {n: _child(child, where.at(n)) for n, child in module._modules.items() if n not in held},
        "attributes": {n: encode(value, where.at(n)) for n, value in plain.items() if n not in loose},
    }


def _child(child: nn.Module | None, where: _Where) -> Any:
    if child is None:
        return None
    first = where.paths[id(child)]
    return {"shared": first} if first != where.name else _module(child, where)


def _parameter(parameter: nn.Parameter | None, where: _Where) -> dict[str, Any] | None:
    if parameter is None:
        return None
    hooks = [encode(hook, where) for hook in gradient_hooks(parameter)]
    return {
        "tensor": where.tensors.get(id(parameter), where.name),
        "requires_grad": parameter.requires_grad,
        **({"hooks": hooks} if hooks else {}),
    }


def _buffer(buffer: Tensor | None, persistent: bool, state: bool, where: _Where) -> dict[str, Any] | None:
    if buffer is None:
        return None
    if state:
        return {"empty": dtype_name(buffer.dtype), "persistent": persistent}
    return {"persistent": persistent, **_tensor(buffer, where)}


def _tensor(tensor: Tensor, where: _Where) -> dict[str, Any]:
    data: dict[str, Any] = {
        "kind": "tensor",
        "tensor": where.tensors.get(id(tensor), where.name),
        "requires_grad": tensor.requires_grad,
    }
    if tensor.numel() <= SMALL and (not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())):
        data |= {"dtype": dtype_name(tensor.dtype), "data": tensor.detach().cpu().tolist()}
    return data


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def encode(value: Any, where: _Where) -> Any:
    """Any value as JSON data; CheckpointError for one that cannot be written."""
    if value is None or isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"kind": "float", "value": repr(value)}
    if type(value) is list:
        return [encode(item, where.at(str(index))) for index, item in enumerate(value)]
    return _container(value, where) or _reference(value, where) or _object(value, where)


def _container(value: Any, where: _Where) -> dict[str, Any] | None:
    if isinstance(value, torch.Size):
        return {"kind": "size", "items": list(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: encode(getattr(value, name), where.at(name)) for name in value._fields}
        return {"kind": "namedtuple", "class": import_path(type(value), where), "fields": fields}
    if type(value) in (tuple, set, frozenset):
        items = [encode(item, where.at(str(index))) for index, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, dict):
        pairs = [[encode(key, where), encode(item, where.at(str(key)))] for key, item in value.items()]
        return {"kind": "dict", "class": import_path(type(value), where), "items": pairs}
    return None


def _reference(value: Any, where: _Where) -> dict[str, Any] | None:
    """Things that are named, not written out: tensors, modules, dtypes, enums, functions, classes, methods."""
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if isinstance(value, nn.Module):
        if id(value) not in where.paths:
            raise where.refuse(f"is a module ({type(value).__name__}) that is not a submodule of the layer")
        return {"kind": "module", "path": where.paths[id(value)]}
    if isinstance(value, torch.dtype):
        return {"kind": "dtype", "name": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"kind": "device", "name": str(value)}
    if isinstance(value, enum.Enum):
        return {"kind": "enum", "class": import_path(type(value), where), "name": value.name}
    return _callable(value, where) if callable(value) and not hasattr(value, "__dataclass_fields__") else None


def _callable(value: Any, where: _Where) -> dict[str, Any] | None:
    if isinstance(value, functools.partial):
        parts = [encode(value.func, where), encode(list(value.args), where), encode(value.keywords, where)]
        return {"kind": "partial", "parts": parts}
    owner = getattr(value, "__self__", None)
    surrogate = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)  # its apply may be a C method
    if surrogate or isinstance(value, types.MethodType) and isinstance(owner, type):
        return {"kind": "method", "class": import_path(owner, where), "name": value.__name__}
    if isinstance(value, types.MethodType):
        return {"kind": "method", "of": encode(owner, where), "name": value.__name__}
    if isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__:
        return _closure(value, where)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return {"kind": "import", "path": import_path(value, where)}
    return None


def _closure(function: types.FunctionType, where: _Where) -> dict[str, Any]:
    """A function made inside another one: which, its place there, and the values it holds on to."""
    maker = _maker_path(function, where)
    at = next((index for index, code in enumerate(inner_codes(maker)) if code is function.__code__), None)
    if at is None:
        raise where.refuse(f"is the local function {function.__qualname__}, which is not found in its maker")
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return {
        "kind": "closure",
        "maker": maker,
        "name": function.__qualname__,
        "at": at,
        "cells": [
            encode(cell, where.at(name)) for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        ],
        "defaults": encode(function.__defaults__, where),
        "kwdefaults": encode(function.__kwdefaults__, where),
    }


def inner_codes(maker: str) -> Iterator[types.CodeType]:
    """The code of every function defined inside the function with this import path, in the order of the source."""
    function = find(maker)
    code = getattr(function, "__code__", None)
    pending = [code] if code is not None else []
    while pending:
        nested = [const for const in pending.pop(0).co_consts if isinstance(const, types.CodeType)]
        yield from nested
        pending.extend(nested)


def _object(value: Any, where: _Where) -> dict[str, Any]:
    """An object of a plain class: its class and its attributes."""
    kind = type(value)
    if not hasattr(value, "__dict__") or kind.__module__ == "builtins":
        raise where.refuse(f"is of type {kind.__qualname__}, which cannot be written")
    state = {name: encode(item, where.at(name)) for name, item in vars(value).items()}
    return {"kind": "object", "class": import_path(kind, where), "state": state}


def import_path(value: Any, where: _Where) -> str:
    """`package.module:qualified.name` of a class or function that can be imported by it."""
    module = getattr(value, "__module__", None) or "torch"
    name = value.__name__ if isinstance(value, types.BuiltinFunctionType) else value.__qualname__
    for candidate in (module, *_modules_with(value, module.partition(".")[0], name)):
        if _found(f"{candidate}:{name}") is value:
            return f"{candidate}:{name}"
    raise where.refuse(f"is {name} of module {module}, which cannot be imported by that name")


def _modules_with(value: Any, package: str, name: str) -> list[str]:
    """Imported modules of the package that hold the value: Norse's parameter classes name the wrong module."""
    loaded = [(key, module) for key, module in sys.modules.items() if key.partition(".")[0] == package]
    return sorted((key for key, module in loaded if vars(module).get(name) is value), key=lambda key: (len(key), key))


def _maker_path(function: types.FunctionType, where: _Where) -> str:
    path = f"{function.__module__}:{function.__qualname__.partition('.<locals>')[0]}"
    if _found(path) is None:
        raise where.refuse(f"is the local function {function.__qualname__}, whose maker cannot be imported")
    return path


def _found(path: str) -> Any:
    try:
        return find(path)
    except (ImportError, AttributeError):
        return None


def find(path: str) -> Any:
    """What an import path names."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
