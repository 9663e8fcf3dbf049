"""The BatchNorm of a fused neuron: what its kernels need to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from snnpart import ops, ops_time


@dataclass(frozen=True)
class Norm:
    """Which operation normalises, over how many steps, and its arguments behind x."""

    kind: Callable[..., Tensor]
    steps: int
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    counter: Tensor | None
    training: bool
    momentum: float
    eps: float

    @property
    def batch(self) -> bool:
        """Whether the batch's own statistics are used."""
        return self.training or self.running_mean is None

    @property
    def per_step(self) -> bool:
        """Whether each step has its own statistics."""
        return self.batch and self.kind is ops_time.batch_norm_steps

    @property
    def updates(self) -> int:
        """How often the layer is called, by its counter."""
        return self.steps if self.kind in (ops_time.batch_norm_steps, ops_time.batch_norm_repeated) else 1

    @property
    def factor(self) -> float:
        """How far the statistics of one call of the kernel move the running ones."""
        calls = self.updates if self.kind is ops_time.batch_norm_repeated else 1
        return float(1.0 - (1.0 - self.momentum) ** calls)

    @property
    def copies(self) -> int:
        """How many equal x the running variance is unbiased over."""
        return self.steps if self.kind is ops.batch_norm_copies else 1
