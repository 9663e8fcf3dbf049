"""Which numbers an `autograd.Function` gives: its forward is run once, watched, on small tensors.

A spike function compares and casts (`(u >= 0).to(u)`), an integer one clamps and rounds: that the result is 0 or 1, or
a few whole numbers, follows from the operations alone, whatever the data. So every torch function that forward calls is
read off, and intervals are carried along. Nothing is claimed where forward looks at data (a branch), writes in place,
or uses a function that is not in the table, such as a kernel of its own.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from snnpart import facts
from snnpart.facts import Value
from snnpart.ops import Surrogate

Bounds = tuple[float, float, bool]
"""Lowest and highest number, and whether there are whole numbers only."""

ANY: Bounds = (-math.inf, math.inf, False)
_BIT: Bounds = (0.0, 1.0, True)


def surrogate_bounds(node: fx.Node) -> Bounds:
    """The numbers that a `Surrogate` node's result can hold."""
    assert isinstance(node.target, Surrogate)
    values = [facts.get(arg, Value) if isinstance(arg, fx.Node) else None for arg in node.args]
    known = all(value is not None or not isinstance(arg, fx.Node) for arg, value in zip(node.args, values))
    if not known or node.kwargs:
        return ANY
    forms = tuple(None if value is None else (value.shape, value.dtype) for value in values)
    literals = tuple(arg for arg, value in zip(node.args, values) if value is None)
    try:
        return _bounds(node.target.function, forms, literals)
    except TypeError:  # an argument that cannot be a key
        return ANY


@cache
def _bounds(function: type[Function], forms: tuple[Any, ...], literals: tuple[Any, ...]) -> Bounds:
    rest = iter(literals)
    arguments = [next(rest) if form is None else _sample(*form) for form in forms]
    context = () if function.setup_context is not Function.setup_context else (_context(len(arguments)),)
    watch = _Watch([x for x in arguments if isinstance(x, Tensor)])
    try:
        with torch.random.fork_rng([]), torch.no_grad(), watch:
            result = function.forward(*context, *arguments)
    except Exception:  # what forward needs is not here: its own kernel, a device
        return ANY
    return watch.of(result) if isinstance(result, Tensor) and not watch.lost else ANY


def _sample(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A small tensor that broadcasts as one of this shape does."""
    return torch.zeros([min(size, 2) for size in shape], dtype=dtype)


def _context(count: int) -> Any:
    ignore = lambda *args, **kwargs: None  # noqa: E731
    names = ("save_for_backward", "save_for_forward", "mark_non_differentiable", "mark_dirty", "set_materialize_grads")
    return types.SimpleNamespace(needs_input_grad=(True,) * count, **dict.fromkeys(names, ignore))


class _Watch(TorchFunctionMode):
    """Carries bounds through the torch functions that are called; `lost` when something else happened."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.lost = False
        self._bounds: dict[int, Bounds] = {id(x): _of_dtype(x, ANY) for x in inputs}
        self._kept: list[Tensor] = list(inputs)

    def of(self, x: Any) -> Bounds:
        """The bounds of an operand: of a number its value, of a constant tensor its values."""
        if isinstance(x, Tensor):
            return self._bounds.get(id(x), ANY)
        number = float(x) if isinstance(x, (bool, int, float)) else math.nan
        return ANY if number != number else (number, number, number.is_integer())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        out = func(*args, **options)
        self.lost |= name in _LOOKS.split() or (name.endswith("_") and not name.startswith("__")) or "out" in options
        name = name.strip("_") if name.startswith("__") else name
        if isinstance(out, Tensor):
            self._kept.append(out)
            self._bounds[id(out)] = _of_dtype(out, self._result(name, out, args, options))
        return out

    def _result(self, name: str, out: Tensor, args: Sequence[Any], options: Mapping[str, Any]) -> Bounds:
        if not any(isinstance(x, Tensor) for x in (*args, *options.values())):
            return _values(out)
        rule = _RULES.get(name)
        if rule is None or (options and name not in _SAME.split()):
            return ANY
        return rule([self.of(x) for x in args])


def _of_dtype(x: Tensor, found: Bounds) -> Bounds:
    if x.dtype is torch.bool:
        return _BIT
    return found if x.is_floating_point() or x.is_complex() else (*found[:2], True)


def _values(constant: Tensor) -> Bounds:
    """Of a tensor that does not depend on the inputs: what it holds."""
    if not constant.numel() or constant.is_complex() or constant.is_meta:
        return ANY
    x = constant.detach().double()
    return float(x.min()), float(x.max()), bool((x == x.round()).all())


def _hull(*given: Bounds) -> Bounds:
    return min(g[0] for g in given), max(g[1] for g in given), all(g[2] for g in given)


def _rounded(given: Sequence[Bounds]) -> Bounds:
    low, high, _ = given[0]
    finite = lambda edge, f: f(edge) if math.isfinite(edge) else edge  # noqa: E731
    return finite(low, math.floor), finite(high, math.ceil), True


def _clamp(given: Sequence[Bounds]) -> Bounds:
    if len(given) < 3 or given[1][0] != given[1][1] or given[2][0] != given[2][1]:
        return ANY
    low, high = given[1][0], given[2][0]
    return low, max(low, high), given[0][2] and given[1][2] and given[2][2]


def _product(given: Sequence[Bounds]) -> Bounds:
    (a, b, whole), (c, d, also) = given[0], given[1]
    if not all(map(math.isfinite, (a, b, c, d))):
        return ANY
    ends = (a * c, a * d, b * c, b * d)
    return min(ends), max(ends), whole and also


_COMPARE = (
    "eq ne lt le gt ge greater greater_equal less less_equal logical_and logical_or logical_not logical_xor isnan"
)
_SAME = (
    "to type type_as float double half bfloat16 int long bool clone contiguous detach view reshape view_as reshape_as "
    "expand expand_as flatten unsqueeze squeeze permute transpose"
)
_LOOKS = (
    "__bool__ __float__ __int__ __index__ __array__ __iter__ __setitem__ __set__ __iadd__ __isub__ __imul__ __iand__ "
    "__ior__ __ixor__ __itruediv__ item tolist numpy"
)
_RULES: Mapping[str, Callable[[Sequence[Bounds]], Bounds]] = {
    **dict.fromkeys(_COMPARE.split(), lambda given: _BIT),
    **dict.fromkeys(_SAME.split(), lambda given: given[0]),
    **dict.fromkeys(("zeros_like", "new_zeros"), lambda given: (0.0, 0.0, True)),
    **dict.fromkeys(("ones_like", "new_ones"), lambda given: (1.0, 1.0, True)),
    **dict.fromkeys(("round", "floor", "ceil"), _rounded),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("mul", "multiply"), _product),
    "heaviside": lambda given: _hull(_BIT, given[1]),
    "where": lambda given: _hull(*given[1:]) if len(given) > 2 else ANY,
    "sign": lambda given: (-1.0, 1.0, True),
}  # fmt: skip
