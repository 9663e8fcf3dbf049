"""Tensors of a module put in the place of its own while a step of it is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def filling_with_tensors() -> Iterator[None]:
    """A block in which `torch.full` takes a tensor of the size asked for: of a parameter it usually takes the number,
    without a gradient, and parameters are as large as a step here."""
    own = torch.full

    def full(size: Any, fill_value: Any, **kwargs: Any) -> Tensor:
        if not isinstance(fill_value, Tensor) or fill_value.shape != torch.Size(size):
            return own(size, fill_value, **kwargs)
        return fill_value.detach().clone().to(kwargs.get("dtype") or fill_value.dtype)

    torch.full = full
    try:
        yield
    finally:
        torch.full = own


def owned(module: nn.Module, dotted: str) -> tuple[dict[str, Any], str]:
    """Where a tensor of the module hangs: the table of parameters or buffers, and its name there.

    Submodules are looked up as such: an adapter's copy may have one under the name of a plain attribute.
    """
    *path, name = dotted.split(".")
    for atom in path:
        module = module._modules[atom]  # type: ignore[assignment]
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    return table, name


def _places(module: nn.Module, dotted: str) -> list[tuple[dict[str, Any], str]]:
    """Where the tensor of this name hangs, as `owned`, and wherever else: a module inside may share it."""
    table, name = owned(module, dotted)
    tables: list[dict[str, Any]] = [held for part in module.modules() for held in (part._parameters, part._buffers)]
    return [(held, key) for held in tables for key, value in held.items() if value is table[name]]


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """A block in which the module has these tensors in the place of its own, under all names that one has."""
    places = [(*place, value) for name, value in tensors.items() for place in _places(module, name)]
    before = [table[name] for table, name, _ in places]
    try:
        for table, name, value in places:
            table[name] = value
        yield
    finally:
        for (table, name, _), value in zip(places, before, strict=True):
            table[name] = value
