"""Tensors for sizes and for the number that fills a tensor: `torch.zeros(n, self.width)`, `torch.full(s, self.rest)`.

A size must be known while tracing: it is read as a Python value, which is possible for a constant of the network and
refused for a value of forward. The number that fills a tensor stays a value: `full(s, v)` becomes `zeros(s) + v`,
in the dtype that `full` gives: without a `dtype` that of the Python number in `v`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snnpart.trace.cells import Called

MADE = frozenset(["zeros", "ones", "full", "empty", "rand", "randn"])
"""Functions that make a tensor: their positional arguments begin with its sizes."""
SHAPED = frozenset(["new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape", "expand", "repeat"])
"""Methods whose arguments begin with sizes, after the tensor itself."""
_FILLED = frozenset(["full", "new_full"])
_PLACED = frozenset(["dtype", "device", "requires_grad"])

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def with_plain_sizes(called: Called, read: Callable[[Tensor], Any]) -> Called | None:
    """The call with sizes that are tensors read as Python values; None where there are none."""
    start = 1 if called.name in SHAPED else 0
    stop = start + 1 if called.name in _FILLED else len(called.args)
    sizes = _read(called.args[start:stop], read)
    kwargs = {k: _read(v, read) if k in ("size", "shape") else v for k, v in called.kwargs.items()}
    args = (*called.args[:start], *sizes, *called.args[stop:])
    same = all(new is old for new, old in zip((*args, *kwargs.values()), (*called.args, *called.kwargs.values())))
    return None if same else called._replace(args=args, kwargs=kwargs)


def _read(value: Any, read: Callable[[Tensor], Any]) -> Any:
    """A number, or tuple or list of numbers, without tensors among them; the value itself where there are none."""
    if isinstance(value, Tensor):
        return read(value) if value.dim() == 0 and not value.is_floating_point() else value
    if not isinstance(value, (tuple, list)) or not any(isinstance(item, (Tensor, tuple, list)) for item in value):
        return value
    items = [_read(item, read) for item in value]
    return value if all(new is old for new, old in zip(items, value)) else type(value)(items)


def filled(called: Called, run: Run) -> Any:
    """`torch.full` with a tensor for the number: that many zeros, and the number added; NotImplemented for others."""
    value = called.kwargs.get("fill_value", called.args[1] if len(called.args) > 1 else None)
    kwargs = {key: given for key, given in called.kwargs.items() if key not in ("size", "fill_value")}
    if called.name != "full" or not isinstance(value, Tensor) or kwargs.keys() - _PLACED or value.dim():
        return NotImplemented
    dtype = kwargs.get("dtype") or _dtype_without(value)
    if not (torch.can_cast(value.dtype, dtype) or dtype is torch.bool):
        return NotImplemented
    size = called.kwargs.get("size", called.args[0] if called.args else ())
    zeros = run(torch.zeros, (size,), {**kwargs, "dtype": dtype, "requires_grad": False})
    number = run(torch.Tensor.detach, (value,), {})
    number = number if value.dtype is dtype else run(torch.Tensor.to, (number, dtype), {})
    made = run(torch.add, (zeros, number), {})
    return run(torch.Tensor.requires_grad_, (made,), {}) if kwargs.get("requires_grad") else made


def _dtype_without(value: Tensor) -> torch.dtype:
    """The dtype of `torch.full` that is given none: that of the Python number that the tensor stands for."""
    if value.dtype.is_complex:
        return torch.get_default_dtype().to_complex()
    if value.dtype.is_floating_point:
        return torch.get_default_dtype()
    return value.dtype if value.dtype is torch.bool else torch.int64
