"""A case: a network, its batches, and what is the same for every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from spikingjelly.activation_based.neuron import LIFNode
from torch import Tensor, nn

from tests.neurons import LIF
from tests.neurons import fill as filled

fill = partial(filled, scale=0.5)


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, LIF | LIFNode):
            module.reset()


@dataclass(frozen=True)
class Case:
    """A network, its batches, and how `parallelize` and the steps are called.

    `batches` gives (inputs, targets) of each step, the whole batch. `loss` None: `(output * targets).sum()`, as a mean
    over samples times their number. `batch_dim` is that of the input, `target_dim` that of targets.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], list[tuple[Tensor, Tensor]]]
    loss: Callable[[Any, Any], Tensor] | None = None
    batch_dim: int = 0
    target_dim: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        """The network in one process: once, or once for every step of the window."""
        if "time_steps" not in self.options:
            out: Tensor = model(x)
            return out
        return torch.stack([model(step) for step in x])

    def loss_fn(self, samples: int) -> Callable[[Any, Any], Tensor]:
        """The loss for a step with so many samples over all dp ranks."""
        if self.loss is not None:
            return self.loss
        return lambda out, weights: (out * weights).sum() * (samples / out.shape[self.target_dim])
