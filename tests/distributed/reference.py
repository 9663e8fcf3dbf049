"""What one process computes: the semantics that a launched program must have, written down as a plain loop.

Each dp rank is a copy of the module; it accumulates gradients over its microbatches (BatchNorm uses the statistics of
one microbatch and updates its averages once for each, in order). The step's gradient is that of the mean over all
samples of all dp ranks. Buffers after a step are dp rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LossFn = Callable[[Any, Any], Tensor]


def pieces(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    return list(x.split(list(sizes), dim))


def even(size: int, parts: int) -> list[int]:
    return [size // parts + (i < size % parts) for i in range(parts)]


class OneProcess:
    """Train steps of a module in one process, as `dp` ranks with `microbatches` would do them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        microbatches: int = 1,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        clip: float | None = None,
        reset: Callable[[nn.Module], Any] = lambda model: None,
        batch_dim: int = 0,
        target_dim: int = 0,
        call: Callable[[nn.Module, Tensor], Any] = lambda model, x: model(x),
    ) -> None:
        self.model, self.microbatches, self.reset, self.clip = model, microbatches, reset, clip
        self.batch_dim, self.target_dim, self.call = batch_dim, target_dim, call
        self.optimizer = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer else None

    def train_step(self, batches: Sequence[tuple[Tensor, Tensor]], loss_fn: LossFn) -> float:
        """One step; `batches[r]` is dp rank r's. The loss over all samples."""
        if self.optimizer:
            self.optimizer.zero_grad()
        everyone = sum(x.shape[self.batch_dim] for x, _ in batches)
        total = 0.0
        for rank, (inputs, targets) in enumerate(batches):
            buffers = self._statistics()
            sizes = even(inputs.shape[self.batch_dim], self.microbatches)
            for x, y in zip(
                pieces(inputs, self.batch_dim, sizes), pieces(targets, self.target_dim, sizes), strict=True
            ):
                self.reset(self.model)
                loss = loss_fn(self.call(self.model, x), y) * (x.shape[self.batch_dim] / everyone)
                loss.backward()
                total += loss.item()
            if rank == 0:
                after = self._statistics()
            self._set_statistics(buffers)
        self._set_statistics(after)
        self.reset(self.model)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.optimizer:
            self.optimizer.step()
        return total

    def _statistics(self) -> dict[str, Tensor]:
        """Copies of BatchNorm's buffers; other modules keep neuron state in theirs."""
        norms = [(path, m) for path, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        return {f"{path}.{n}": b.clone() for path, norm in norms for n, b in norm.named_buffers(recurse=False)}

    def _set_statistics(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.model.get_buffer(name).copy_(value)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def evaluate(self, inputs: Tensor) -> Any:
        self.model.eval()
        self.reset(self.model)
        with torch.no_grad():
            outputs = self.call(self.model, inputs)
        self.reset(self.model)
        self.model.train()
        return outputs


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    """Same names, and every tensor equal to `tolerance` of its scale."""
    assert sorted(actual) == sorted(wanted)
    for name, value in wanted.items():
        scale = max(1.0, float(value.detach().abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
