"""How the sequence that a scan goes through lies, which the adapter of a neuron layer says.

[T, N, ...]    loops of the graph, and most layers
[N, T, ...]    samples first
[N*T, ...]     samples first, both dims merged to rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from snnpart.frameworks import adapter_for


@dataclass(frozen=True)
class Order:
    """`samples_first`: [N, T, ...]; `merged`: as rows [N*T, ...]."""

    samples_first: bool = False
    merged: bool = False

    def step_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one step of a sequence of this shape, its samples uncounted where they are merged."""
        if self.merged:
            return tuple(shape)
        return (shape[0], *shape[2:]) if self.samples_first else tuple(shape[1:])

    def shapes(self, shape: tuple[int, ...], steps: int) -> set[tuple[int, ...]]:
        """A sequence's shape with steps and samples apart, and with both merged."""
        if self.merged:
            return {shape, (shape[0] // steps, steps, *shape[1:])}
        return {shape, (shape[0] * shape[1], *shape[2:])} if len(shape) > 1 else {shape}

    def steps_first(self, x: Tensor, steps: int) -> Tensor:
        """The sequence as [T, N, ...]."""
        stacked = x.unflatten(0, (-1, steps)) if self.merged else x
        return stacked.transpose(0, 1) if self.samples_first else stacked

    def as_layer(self, x: Tensor) -> Tensor:
        """A sequence [T, N, ...] in this order."""
        stacked = x.transpose(0, 1) if self.samples_first else x
        return stacked.flatten(0, 1) if self.merged else stacked


def order_of(module: nn.Module) -> Order | None:
    """The order in which a neuron layer takes all steps in one call; None: it takes none, or has time elsewhere."""
    adapter = adapter_for(module)
    if adapter.merged_steps(module, 1) is not None:
        return Order(samples_first=True, merged=True)
    dim = adapter.time_dim(module)
    return None if dim not in (0, 1) else Order(samples_first=dim == 1)
