"""How a call is written in the graph: operators and properties of tensors as functions, methods as methods."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from snnpart.trace.cells import Called

_REFLECTED = {
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rpow__": operator.pow,
    "__rmod__": operator.mod,
    "__rmatmul__": operator.matmul,
    "__rsub__": operator.sub,
    "__radd__": operator.add,
    "__rmul__": operator.mul,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
    "__rlshift__": operator.lshift,
    "__rrshift__": operator.rshift,
}


class Spelled(NamedTuple):
    """A node to be: fx's op, its target and arguments, and the name of the function for those who look at views."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str


def spell(called: Called) -> Spelled:
    """The node for a call that was not made in place."""
    function, name, args, kwargs, _ = called
    if name == "__get__":
        return _property(function.__self__.__name__, args[0])
    if name == "__getitem__":
        return Spelled("call_function", operator.getitem, args, kwargs, name)
    method = getattr(torch.Tensor, name, None)
    if method is not function and (method is None or method is not getattr(function, "__wrapped__", None)):
        return Spelled("call_function", function, args, kwargs, name)
    if name in _REFLECTED:
        return Spelled("call_function", _REFLECTED[name], (args[1], args[0]), {}, name)
    return Spelled("call_method", name, args, kwargs, name)


def _property(name: str, x: torch.Tensor) -> Spelled:
    """`x.T`, `x.mT`, `x.data` and the like."""
    if name == "data":
        return Spelled("call_function", torch.detach, (x,), {}, name)
    if name == "T":
        return Spelled("call_method", "permute", (x, *range(x.dim() - 1, -1, -1)), {}, name)
    if name == "mT":
        return Spelled("call_method", "transpose", (x, -2, -1), {}, name)
    return Spelled("call_function", getattr, (x, name), {}, name)
