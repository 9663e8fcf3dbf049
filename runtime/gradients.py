"""Gradients after backward: sums over tp of those each rank has in part, and the norm over all ranks for clipping.

A parameter that every tp rank holds whole but uses on its own channels only (a learnable scalar time constant inside a
neuron) has a part of its gradient on each rank. Gradients that earlier steps left are already sums, so they are put
aside during a step.

The global norm counts every number of the network once: slices over tp and shards over dp add up, copies count on the
first rank that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from snnpart.errors import LaunchError
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.reduction import fused
from snnpart.runtime.stage import Stage


class PartialGradients:
    """The parameters whose gradient each tp rank has in part; `begin` before a step, `finish` after its backward."""

    def __init__(self, stage: Stage, ranks: Ranks) -> None:
        self._stage, self._axis = stage, ranks.axes["tp"]
        self._names = [name for name, part in stage.slices.items() if part.partial_gradient]
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []

    def begin(self) -> None:
        """Put aside what earlier steps accumulated."""
        if self._axis.group is None:
            return
        held = dict(self._stage.parameters())
        self._before = [(held[name], held[name].grad) for name in self._names]
        for parameter, _ in self._before:
            parameter.grad = None

    def finish(self) -> None:
        """Sum this step's gradients over tp and add what was put aside."""
        new = [parameter.grad for parameter, _ in self._before if parameter.grad is not None]
        with torch.no_grad():
            fused(map(local_part, new), lambda flat: dist.all_reduce(flat, group=self._axis.group))
            for parameter, before in self._before:
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []


def clip(stage: Stage, ranks: Ranks, limit: float) -> float:
    """Scale all gradients so that their norm over all ranks is at most `limit`; the norm before. Collective.

    Raises:
        LaunchError: on every rank, when a gradient holds NaN or Inf: it names the parameters and their stages.
    """
    squares, bad = 0.0, []
    for name, grad, counts in local_gradients(stage, ranks):
        square = float(grad.to(torch.float64).square().sum()) if grad.numel() else 0.0
        if square - square:  # NaN for NaN and Inf, 0 for every number
            bad.append(f"'{name}' (stage {stage.stage_of[name]})")
        squares += square if counts else 0.0
    total, failures = ranks.sum([0.0 if bad else squares, len(bad)])
    if failures:
        names = sorted({name for found in ranks.gather(bad) for name in found})
        raise LaunchError(
            f"the gradients of {', '.join(names[:5])} hold NaN or Inf",
            fix="lower the learning rate or scale the loss; the parameters were not changed",
        )
    norm = float(total**0.5)
    if norm > limit:
        with torch.no_grad():
            for _, grad, _ in local_gradients(stage, ranks):
                grad.mul_(limit / (norm + 1e-6))
    return norm


def local_gradients(stage: Stage, ranks: Ranks) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, local gradient, and whether this rank is the one that counts it."""
    at = ranks.at
    for name, parameter in stage.parameters():
        if parameter.grad is not None:
            sliced = stage.slices[name].dim is not None or at.tp == 0
            sharded = isinstance(parameter.grad, DTensor) or at.dp == 0
            yield name, local_part(parameter.grad), sliced and sharded


def local_part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, another tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
