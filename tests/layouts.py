"""Counts what changes the memory layout of images while code runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = ("clone", "_to_copy", "contiguous", "copy_", "cat", "stack")


class LayoutChanges(TorchDispatchMode):
    """Notes every operation that reads an image in one layout and gives it in another, by name.

    Images have four dims, of which the last three are no single numbers: otherwise the two layouts are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        source = args[1] if "copy_" in str(func) and len(args) > 1 else args[0] if args else None
        given = source[0] if isinstance(source, (list, tuple)) and source else source
        if any(name in str(func) for name in _COPIES) and isinstance(given, Tensor) and isinstance(made, Tensor):
            before, after = _layout(given), _layout(made)
            if before and after and before != after:
                self.found.append(f"{func} {tuple(given.shape)}")
        return made


def _layout(x: Tensor) -> str:
    if x.dim() == 5:
        x = x.flatten(0, 1) if x.stride(0) == x.shape[1] * x.stride(1) else x[0]
    if x.dim() != 4 or 1 in x.shape[1:]:
        return ""
    if x.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    return "contiguous" if x.is_contiguous() else "other"
