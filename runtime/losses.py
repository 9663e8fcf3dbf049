"""What a loss of microbatches means: how much each counts, and whether the loss is of the kind that was said.

    "mean"      loss_fn is a mean over samples: a microbatch of n samples counts n / N of the samples of all dp ranks
    "sum"       loss_fn is a sum over samples: the losses are added, over dp ranks too
    a function  of a microbatch's targets giving its weight w: sum of w loss / sum of w. Cross-entropy with class
                weights is exact with `lambda y: weight[y].sum()`, with `ignore_index` with
                `lambda y: (y != index).sum()`
    "merged"    (GPipe only) loss_fn is evaluated once, on the outputs of all microbatches of a dp rank put together;
                dp ranks count by their samples

The first train step evaluates the loss of one microbatch on two parts of it as well: a loss that is not of the kind
that was said would train another network for every number of microbatches, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError
from snnpart.graph import SpikeGraph
from snnpart.runtime import microbatch

Weigh = Callable[[Any], Any]
KINDS = ("mean", "sum", "merged")
TOLERANCE = 1e-3
"""Relative: float32 losses are good to 1e-6, a loss of another kind is off by more than this."""


@dataclass(frozen=True)
class Reduction:
    """`kind` of `KINDS`, or "weights" with the function that gives them."""

    kind: str = "mean"
    weigh: Weigh | None = None

    def weight(self, size: int, targets: Any) -> float:
        """How much a microbatch of `size` samples counts.

        Raises:
            ConfigError: the user's function gives no finite number that is at least 0.
        """
        if self.weigh is None:
            return float(size)
        weight = float(self.weigh(targets))
        if not 0 <= weight < float("inf"):
            raise ConfigError(
                f"loss_reduction gave the weight {weight} for a microbatch of {size} samples",
                fix="return a number >= 0, as `lambda y: (y != ignore_index).sum()` does",
            )
        return weight

    def factor(self, weight: float, total: float, dp: int) -> float:
        """What the loss of a microbatch is multiplied by; gradients are averaged over dp afterwards.

        `total` is the sum of the weights over all microbatches and dp ranks.
        """
        if self.kind == "sum":
            return float(dp)
        return weight * dp / total if total else 0.0


MEAN = Reduction()


def reduction_of(asked: Any, schedule: str) -> Reduction:
    """The reduction that `launch(loss_reduction=...)` means.

    Raises:
        ConfigError: it is none, or the schedule cannot do it.
    """
    if callable(asked):
        return Reduction("weights", asked)
    if asked not in KINDS:
        raise ConfigError(
            f"loss_reduction={asked!r} is not known",
            fix="or give a function of a microbatch's targets that returns its weight",
            choices=KINDS,
        )
    if asked == "merged" and schedule != "gpipe":
        raise ConfigError(
            f'loss_reduction="merged" waits for all forwards, which schedule={schedule!r} does not',
            fix='compile with schedule="gpipe", or give the weight of a microbatch as a function',
        )
    return Reduction(asked)


@dataclass
class Merged:
    """The loss of all microbatches at once: outputs are kept as leaves until the last forward is done."""

    source: SpikeGraph
    sizes: Sequence[int]
    loss: Callable[[Sequence[Tensor]], Tensor]

    def gradients(
        self, outputs: Sequence[Sequence[Tensor]], seed: Callable[[Tensor], Tensor | None]
    ) -> tuple[Tensor, list[list[Tensor | None]]]:
        """The loss, and the gradient of `seed` times it for every output of every microbatch (None: it has none)."""
        leaves = [[x.detach().requires_grad_(x.requires_grad) for x in part] for part in outputs]
        loss = self.loss(microbatch.merge(leaves, self.source, self.sizes))
        learn = [x for part in leaves for x in part if x.requires_grad]
        if not loss.requires_grad or not learn:
            return loss, [[None] * len(part) for part in leaves]
        found = iter(torch.autograd.grad(loss, learn, seed(loss), allow_unused=True))
        return loss.detach(), [[next(found) if x.requires_grad else None for x in part] for part in leaves]


@dataclass
class LossCheck:
    """Whether the loss of the first microbatch is what `reduction` makes of the losses of two parts of it."""

    reduction: Reduction
    loss_fn: Callable[..., Tensor]
    target_dim: int
    problem: ConfigError | None = None
    done: bool = False

    def around(self, loss: Callable[[Sequence[Tensor], Any], Tensor]) -> Callable[[Sequence[Tensor], Any], Tensor]:
        """`loss` (of a microbatch's flat outputs and the `Part` they belong to), checked at its first call."""

        def checked(outputs: Sequence[Tensor], part: Any) -> Tensor:
            source = next(iter(part.bound.values())).source
            if not self.done and part.size > 1 and len(outputs) == len(source.outputs):
                self.done = True
                self.problem = self._compare(outputs, part.targets, source, part.size)
            return loss(outputs, part)

        return checked

    def _compare(self, outputs: Sequence[Tensor], targets: Any, source: SpikeGraph, size: int) -> ConfigError | None:
        sizes = [1, size - 1]
        value = lambda flat, goal: float(self.loss_fn(microbatch.structured(flat, source), goal))  # noqa: E731
        with torch.no_grad():
            cut = [microbatch.split(x, o.batch_dim, sizes) for o, x in zip(source.outputs, outputs, strict=True)]
            goals = microbatch.split_nested(targets, self.target_dim, sizes)
            weights = [self.reduction.weight(n, goal) for n, goal in zip(sizes, goals, strict=True)]
            try:
                whole = value(outputs, targets)
                parts = [value([x[i] for x in cut], g) if weights[i] else 0.0 for i, g in enumerate(goals)]
            except Exception:  # a loss that takes no part of a batch: only its own evaluation can judge it
                return None
        factors = [self.reduction.factor(weight, sum(weights), 1) for weight in weights]
        joined = sum(part * factor for part, factor in zip(parts, factors, strict=True))
        if not math.isfinite(whole) or abs(joined - whole) <= TOLERANCE * max(abs(whole), *map(abs, parts)):
            return None
        return ConfigError(
            f"loss_fn gives {whole:.6g} for {size} samples, but {joined:.6g} when put together from the first one and "
            f"the other {size - 1}: it is not what loss_reduction={self.reduction.kind!r} says",
            where="the loss of the first step",
            fix="launch with the loss_reduction= that it has; with class weights or ignore_index a function of a "
            'microbatch\'s targets giving its weight; "merged" with schedule="gpipe" for any other loss',
            choices=KINDS,
        )
