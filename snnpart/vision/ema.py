"""An exponential average of the weights that each rank holds; together the ranks hold that of the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from snnpart.runtime.running import RunningProgram


class Average:
    """`decay * average + (1 - decay) * weights` after each step; BatchNorm's buffers are taken as they are."""

    def __init__(self, running: RunningProgram, decay: float) -> None:
        self._running, self._decay = running, decay
        self.values: dict[str, Tensor] = {name: local(p).detach().clone() for name, p in running.named_parameters()}

    def update(self) -> None:
        """One step of the average."""
        weights = [local(p).detach() for _, p in self._running.named_parameters()]
        torch._foreach_lerp_(list(self.values.values()), weights, 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The average in the place of the weights, which come back when the block is left."""
        pairs = [(local(p).detach(), self.values[name]) for name, p in self._running.named_parameters()]
        kept = [weight.clone() for weight, _ in pairs]
        for weight, value in pairs:
            weight.copy_(value)
        try:
            yield
        finally:
            for (weight, _), value in zip(pairs, kept, strict=True):
                weight.copy_(value)


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
