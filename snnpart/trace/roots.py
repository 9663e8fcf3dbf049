"""Tensors a module owns: parameters, buffers, and tensors kept anywhere in plain attributes.

A plain attribute may hold tensors in tuples, named tuples, lists, dicts, dataclasses and modules that were never
registered; the name of such a tensor is its path (`cell.p.tau`, `blocks.0.weight`). A tensor reachable under several
names is one root with aliases; the first name in the order of `named_modules` is its own, a registered one before
others. `plain` are the aliases under which no module registers it: a learned number of the model that it gave to a
neuron layer in a tuple of parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["parameter", "buffer", "constant"]
_TORCH_SLOTS = frozenset(vars(nn.Module()))


@dataclass(slots=True)
class Root:
    """One tensor of the network; the fields are those of `snnpart.graph.TensorInfo`."""

    name: str
    kind: Kind
    tensor: Tensor
    persistent: bool = True
    registered: bool = True
    aliases: list[str] = field(default_factory=list)
    leaf: str | None = None
    plain: list[str] = field(default_factory=list)


def find_roots(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> dict[int, Root]:
    """Every tensor the model owns, by id."""
    roots: dict[int, Root] = {}
    leaf_paths: list[str] = []
    plain: list[tuple[str, nn.Module, str | None]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        leaf = next((p for p in reversed(leaf_paths) if path == p or path.startswith(f"{p}.")), None)
        if leaf is None and is_leaf(module):
            leaf_paths.append(path)
            leaf = path
        for root in _registered(path, module, leaf):
            _add(roots, root)
        plain.append((path, module, leaf))
    for path, module, leaf in plain:
        for root in _unregistered(path, module, leaf):
            _add(roots, root)
    return roots


def _add(roots: dict[int, Root], root: Root) -> None:
    known = roots.setdefault(id(root.tensor), root)
    in_a_copy = root.leaf is not None and root.leaf != known.leaf  # a leaf's copy finds its tensors by these names
    learned = root.tensor.requires_grad and (not known.registered or in_a_copy)  # constants are copied
    if (root.registered or learned) and root.name != known.name and root.name not in known.aliases:
        known.aliases.append(root.name)
        if not root.registered:
            known.plain.append(root.name)


def _registered(path: str, module: nn.Module, leaf: str | None) -> Iterator[Root]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Root(_join(path, name), "parameter", parameter, leaf=leaf)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            persistent = name not in module._non_persistent_buffers_set
            yield Root(_join(path, name), "buffer", buffer, persistent, leaf=leaf)


def _unregistered(path: str, module: nn.Module, leaf: str | None) -> Iterator[Root]:
    for attribute, value in vars(module).items():
        if attribute not in _TORCH_SLOTS:
            for name, tensor in tensors_in(value, _join(path, attribute), set()):
                kind: Kind = "parameter" if tensor.requires_grad else "constant"
                yield Root(name, kind, tensor, persistent=False, registered=False, leaf=leaf)


def tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a plain attribute, each with its path."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items = _items(value)
    if items and id(value) not in seen:
        seen.add(id(value))
        for key, item in items:
            yield from tensors_in(item, _join(name, key), seen)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (str, bytes, int, float, type(None), type)):
        return []
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return [(str(i), item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, nn.Module):
        own = [(n, v) for n, v in vars(value).items() if n not in _TORCH_SLOTS]
        return [*value._parameters.items(), *value._buffers.items(), *value._modules.items(), *own]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return []


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
