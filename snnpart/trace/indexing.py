"""`x[t]`, `x[:, t]`, `x[..., 0:2]` on a fake tensor: the view by its strides.

A loop takes another step of its input each time, so that this result is never a known one, and the way through torch's
`select` of a fake tensor takes several times as long as `as_strided`, which makes the same view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BASIC = (int, slice, type(...))


def basic_view(x: Tensor, index: Any) -> Tensor | None:
    """The view `x[index]`; None where the index is not made of integers and slices, or does not fit."""
    items = index if type(index) is tuple else (index,)
    if x.layout is not torch.strided or x.is_complex() or any(type(item) not in _BASIC for item in items):
        return None
    rest = sum(item is ... for item in items)
    missing = x.dim() - len(items) + rest
    if rest > 1 or missing < 0:
        return None
    at = items.index(...) if rest else len(items)
    return _strided(x, (*items[:at], *[slice(None)] * missing, *items[at + rest :]))


def _strided(x: Tensor, items: tuple[Any, ...]) -> Tensor | None:
    """The view by one integer or slice for each dim of `x`, and None where there is a new one."""
    shape, stride, offset = [], [], x.storage_offset()
    for item, size, step in zip(items, x.shape, x.stride(), strict=True):
        taken = _taken(item, size)
        if taken is None:
            return None
        offset += taken.start * step
        if type(item) is slice:
            shape.append(len(taken))
            stride.append(step * taken.step)
    return x.as_strided(shape, stride, offset)


def _taken(item: int | slice, size: int) -> range | None:
    """The places of a dim that an integer or slice takes; None where torch would raise."""
    if isinstance(item, slice):
        ends = (item.start, item.stop, item.step)
        if any(type(end) is not int and end is not None for end in ends) or (item.step is not None and item.step < 1):
            return None
        start, stop, step = item.indices(size)
        return range(start, max(start, stop), step)
    return range(size)[item : item + 1 or None] if -size <= item < size else None
