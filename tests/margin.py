"""How far membranes stay from their thresholds, for networks that only run in float32.

Spikes flip when a sum is ordered otherwise; where the comparison cannot be made in float64 the inputs are chosen so
that no membrane comes near its threshold, and then no spike may flip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MARGIN = 1e-3


@contextmanager
def _watched(found: list[float]) -> Iterator[None]:
    """Note the distance to threshold at every call of a surrogate.

    Its first argument is the membrane's excess over the threshold; in sinabs the membrane, and the threshold is second.
    """
    kinds = [kind for kind in _subclasses(torch.autograd.Function) if "forward" in vars(kind)]
    before = [(kind, vars(kind)["forward"]) for kind in kinds]

    def wrap(kind: Any, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if tensors and tensors[0].is_floating_point() and tensors[0].numel():
                found.append(_distance(tensors[0], tensors[1:] if kind.__module__.startswith("sinabs") else []))
            return original.__func__(*args, **kwargs)

        return staticmethod(forward)

    try:
        for kind, original in before:
            if isinstance(original, staticmethod):
                kind.forward = wrap(kind, original)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in before:
            kind.forward = original  # type: ignore[method-assign]


def _distance(membrane: Tensor, thresholds: list[Tensor]) -> float:
    """Smallest distance: to 0 where the threshold was subtracted before, else to the threshold's multiples."""
    if not thresholds:
        return float(membrane.abs().min())
    multiple = (membrane / thresholds[0]).round().clamp(min=1.0) * thresholds[0]
    return float((membrane - multiple).abs().min())


def _subclasses(kind: type) -> Iterator[Any]:
    child: Any
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def margin(call: Callable[[], Any]) -> float:
    """The smallest distance of any membrane from its threshold in `call()`."""
    found: list[float] = []
    with _watched(found), torch.no_grad():
        call()
    return min(found, default=float("inf"))
