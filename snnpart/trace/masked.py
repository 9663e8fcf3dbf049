"""`x[mask]`, `x[mask] = v` and `x[mask] -= c` with a mask of x's shape, without a shape that depends on data.

    x[mask] = 0.0                  masked_fill(x, mask, 0.0)
    x[mask] = x[mask] * a - b      where(mask, x * a - b, x)

`x[mask]` is a `Selected` that stands for the chosen elements and computes on all of x. It takes sums and differences
with others of its mask, and arithmetic with single numbers: what gives no NaN where the mask is off, so that the
gradient is exact. Everything else needs to know how many elements there are, and is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from snnpart.compat import version
from snnpart.errors import TraceError

_SUMS = (operator.add, operator.sub)
_REFUSED = (
    "len iter bool int float index contains getitem setitem eq ne lt le gt ge matmul pow mod floordiv and or xor "
    "invert abs"
)


def is_mask(x: Any, index: Any) -> bool:
    """Whether the index chooses single elements of x by a mask."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0 and index.shape == x.shape


class Selected:
    """The elements of a tensor that a mask chooses, while tracing; `whole` holds them among all others."""

    __hash__ = object.__hash__

    def __init__(self, x: Tensor, mask: Tensor, refusal: TraceError) -> None:
        self._x, self._mask, self._refusal = x, mask, refusal
        self._versions = version(x), version(mask)

    def whole(self, mask: Tensor | None = None) -> Tensor:
        """The tensor; TraceError when it, or the mask, was written since, or when `mask` is another one."""
        if (version(self._x), version(self._mask)) != self._versions or (mask is not None and mask is not self._mask):
            self.refuse()
        return self._x

    def refuse(self, *_: Any) -> NoReturn:
        """TraceError: what was asked for depends on how many elements there are."""
        raise self._refusal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("clone", "detach"):
            return lambda: Selected(getattr(self.whole(), name)(), self._mask, self._refusal)
        return self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes torch's functions hand a `Selected` over to the mode, which refuses it."""
        return NotImplemented

    def __neg__(self) -> Selected:
        return Selected(-self.whole(), self._mask, self._refusal)

    def _computed(self, compute: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Selected:
        divides = swapped and compute is operator.truediv
        if isinstance(other, Selected):
            other = other.whole(self._mask) if compute in _SUMS else other.refuse()
        elif divides or (isinstance(other, Tensor) and (other.numel() != 1 or other.dim() > 1)):
            self.refuse()
        pair = (other, self.whole()) if swapped else (self.whole(), other)
        return Selected(compute(*pair), self._mask, self._refusal)

    def _computed_in_place(self, compute: Callable[[Any, Any], Any], other: Any) -> Selected:
        made, dtype = self._computed(compute, other, False), self._x.dtype
        if made._x.dtype != dtype:
            self.refuse()
        self._x, self._versions = made._x, made._versions
        return self


def _operator(compute: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Selected, Any], Selected]:
    return lambda self, other: self._computed(compute, other, swapped)


def _in_place(compute: Callable[[Any, Any], Any]) -> Callable[[Selected, Any], Selected]:
    return lambda self, other: self._computed_in_place(compute, other)


for _name in ("add", "sub", "mul", "truediv"):
    _compute = getattr(operator, _name)
    setattr(Selected, f"__{_name}__", _operator(_compute, False))
    setattr(Selected, f"__r{_name}__", _operator(_compute, True))
    setattr(Selected, f"__i{_name}__", _in_place(_compute))
for _name in _REFUSED.split():
    setattr(Selected, f"__{_name}__", Selected.refuse)
