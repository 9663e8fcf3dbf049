"""Comparison of programs that draw their random numbers in another order than the user's module.

A folded time loop draws the masks of all steps at once. Its numbers are as good as the loop's, but others, so that
module and program cannot be compared as they are: both then run with every draw replaced by what it is on average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from snnpart import effects, facts
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop


def draws_otherwise(graph: SpikeGraph) -> bool:
    """Whether a pass has moved random draws of the traced network."""
    return any(
        effects.is_random(node) and (isinstance(node.target, Loop) or facts.origin(node).made_by == "fold-time")
        for node in graph.graph.nodes
    )


class WithoutDraws(TorchFunctionMode):
    """Inside the block a dropout gives its input back, and random tensors hold their mean."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in effects.DROPOUTS and args:
            return args[0]
        mean = _MEANS.get(name)
        if mean is not None and args and isinstance(args[0], Tensor):
            return mean(args[0])
        if name == "randint":
            return _middle(args, given)
        value = _FILLED.get(name)
        if value is not None:
            given.pop("generator", None)
            size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            return torch.full(tuple(size), value, **given)
        return func(*args, **given)


def _middle(args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    """`torch.randint([low,] high, size)` with the integer in the middle everywhere."""
    given.pop("generator", None)
    numbers = [number for number in args if isinstance(number, int)]
    low = given.pop("low", numbers.pop(0) if len(numbers) > 1 else 0)
    high = given.pop("high", numbers[-1] if numbers else None)
    size = given.pop("size", args[-1] if args else ())
    return torch.full(tuple(size), (low + high - 1) // 2, **{"dtype": torch.int64, **given})


_MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": lambda x: torch.full_like(x, 0.5),
    "randn_like": torch.zeros_like,
    "bernoulli": lambda x: (x > 0.5).to(x.dtype),
    "poisson": torch.round,
}
_FILLED = {"rand": 0.5, "randn": 0.0}
