"""In-place functions: which they are, and what computes the same value out of place.

    add_, __iadd__, relu_          the function without the underscore
    relu(x, inplace=True)          the same function with inplace=False
    add(x, y, out=z)               the same function without out
    x[i] = v                       ops.index_assign
    zero_, fill_, copy_            zeros_like, full_like, the source
    uniform_ and other fillers     the method itself, on a clone

The twin's result is cast where the in-place function would have kept the dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.trace.cells import Called

Function = Callable[..., Any]

_CHANGES_SHAPE = "unsqueeze_ squeeze_ transpose_ t_ swapaxes_ swapdims_"
METADATA = frozenset(_CHANGES_SHAPE.split())
"""Methods that change the shape of the tensor object itself, not its values."""

_CHANGES_MEMORY = "set_ resize_ resize_as_ as_strided_ apply_ map_ map2_ sparse_resize_"
REFUSED = frozenset(_CHANGES_MEMORY.split())
_WRITES_NOTHING = "requires_grad_ detach_ share_memory_ rename_ retain_grad"
_NO_WRITE = frozenset(_WRITES_NOTHING.split())
_FILLS = "zero_ fill_ copy_ uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_"
_NO_TWIN = frozenset(_FILLS.split())
_DUNDERS = {
    "__iadd__": "add",
    "__isub__": "sub",
    "__imul__": "mul",
    "__itruediv__": "div",
    "__idiv__": "div",
    "__ifloordiv__": "floor_divide",
    "__imod__": "remainder",
    "__ipow__": "pow",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}


class Twin(NamedTuple):
    """An out-of-place call: how fx writes it, and how Python calls it."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Any:
        return getattr(torch.Tensor, self.target) if self.op == "call_method" else self.target


@cache
def _inplace_position(function: Function) -> int | None:
    """The position of a function's parameter `inplace`."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _asks_inplace(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    if len(args) < 2 or not inspect.isfunction(function):
        return False
    position = _inplace_position(function)
    return position is not None and position < len(args) and bool(args[position])


def written_by(called: Called) -> Any:
    """The tensor (or tuple of them) that this call writes in place, or None."""
    function, name, args, kwargs, _ = called
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if name in _DUNDERS or name == "__setitem__":
        return args[0]
    if name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE:
        return args[0] if args else kwargs.get("input")
    if _asks_inplace(function, args, kwargs):
        return args[0] if args else kwargs.get("input")
    return None


def twin_of(called: Called) -> Twin | None:
    """The out-of-place call, or None when there is none."""
    function, name, args, kwargs, _ = called
    if kwargs.get("out") is not None:
        rest = {key: value for key, value in kwargs.items() if key != "out"}
        return _call(function, name, args, rest)
    if _asks_inplace(function, args, kwargs):
        return _not_inplace(function, args, kwargs)
    if name in _DUNDERS:
        return Twin("call_function", getattr(torch, _DUNDERS[name]), args, kwargs)
    base = name[:-1]
    if name in _NO_TWIN:
        return None
    if getattr(torch.Tensor, name, None) is function:
        return Twin("call_method", base, args, kwargs) if hasattr(torch.Tensor, base) else None
    found = next((getattr(where, base) for where in (torch, F) if hasattr(where, base)), None)
    return Twin("call_function", found, args, kwargs) if found else None


def _not_inplace(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Twin:
    if "inplace" in kwargs:
        return Twin("call_function", function, args, {**kwargs, "inplace": False})
    position = _inplace_position(function)
    assert position is not None
    return Twin("call_function", function, (*args[:position], False, *args[position + 1 :]), kwargs)


def _call(function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Twin:
    if getattr(torch.Tensor, name, None) is function:
        return Twin("call_method", name, args, kwargs)
    return Twin("call_function", function, args, kwargs)


def filled(called: Called, x: Tensor) -> Twin | None:
    """`zero_` and `fill_` with a number as a new tensor; None for everything else."""
    name, args, kwargs = called.name, called.args, called.kwargs
    if name == "zero_":
        return Twin("call_function", torch.zeros_like, (x,), {})
    value = args[1] if len(args) > 1 else kwargs.get("value")
    if name == "fill_" and isinstance(value, (int, float, bool)):
        return Twin("call_function", torch.full_like, (x, value), {})
    return None
