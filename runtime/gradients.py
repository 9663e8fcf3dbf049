"""Gradients after backward: sums of those that several ranks have in part, and the norm over all ranks for clipping.

Ranks have a part each of

- a parameter that every tp rank holds whole but uses on its own channels only (a learnable scalar time constant inside
  a neuron): the sum is over tp;
- a parameter of which several pipeline stages hold a copy (`plan.tied`): the sum is over the ranks of these stages. All
  of them then take the same step from the same value, so that copies stay equal to the bit.

Gradients that earlier steps left are already sums, so they are put aside during a step.

The global norm counts every number of the network once: slices over tp and shards over dp add up, copies count on the
first rank that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from snnpart import hooks
from snnpart.errors import LaunchError
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram
from snnpart.runtime.collectives import Axis
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.reduction import fused
from snnpart.runtime.stage import Stage


class PartialGradients:
    """Parameters whose gradient each rank of an axis has in part; `begin` before a step, `finish` after backward."""

    def __init__(self, stage: Stage, axis: Axis, names: Iterable[str]) -> None:
        self._stage, self._axis, self._names = stage, axis, tuple(names)
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
        """Sum this step's gradients over the axis and add what was put aside."""
        with torch.no_grad():
            new = [local_part(grad) for grad in self._new()]
            fused(new, lambda flat: dist.all_reduce(flat, group=self._axis.group))
            for parameter, before in self._before:
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []

    def forget(self) -> None:
        """Drop what a step that failed left."""
        self._before = []

    def _new(self) -> list[Tensor]:
        """This step's gradients. Ranks of a tp group run one graph, whose loss reaches the same parameters."""
        return [parameter.grad for parameter, _ in self._before if parameter.grad is not None]


class CopiedGradients(PartialGradients):
    """Parameters of which several stages hold a copy. A loss need not reach all copies: the first step finds out which
    parameters it reaches anywhere, and a rank where it does not reach one adds zero."""

    _reached: frozenset[str] | None = None

    def forget(self) -> None:
        super().forget()
        self._reached = None

    def _new(self) -> list[Tensor]:
        held = dict(zip(self._names, (parameter for parameter, _ in self._before), strict=True))
        own = frozenset(name for name, parameter in held.items() if parameter.grad is not None)
        if self._reached is None:
            everyone: list[frozenset[str]] = [own] * self._axis.size
            dist.all_gather_object(everyone, own, group=self._axis.group)
            self._reached = frozenset().union(*everyone)
        if own - self._reached:
            raise LaunchError(
                f"the loss of this step reaches {sorted(own - self._reached)}, which the first step's did not",
                where=self._stage.place,
                fix="use the same outputs in every loss, or launch again when the loss changes",
            )
        for name in self._reached - own:
            held[name].grad = torch.zeros_like(held[name])
        return [parameter.grad for parameter in held.values() if parameter.grad is not None]


def over_tp(stage: Stage, ranks: Ranks) -> PartialGradients:
    """The parameters whose gradient is a sum over tp."""
    return PartialGradients(stage, ranks.axes["tp"], [n for n, part in stage.slices.items() if part.partial_gradient])


def over_copies(stage: Stage, ranks: Ranks, copied: Mapping[str, tuple[int, ...]]) -> list[CopiedGradients]:
    """The parameters of which several stages hold a copy, by the pipeline ranks that do (`holders`)."""
    own: dict[tuple[int, ...], list[str]] = {}
    for name, at in copied.items():
        if ranks.at.pp in at and stage.slices[name].requires_grad and stage.slices[name].has_gradient:
            own.setdefault(at, []).append(name)
    return [CopiedGradients(stage, ranks.among[at], names) for at, names in sorted(own.items())]


def holders(compiled: CompiledProgram) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold a copy of a parameter, where these are several, by its name."""
    parts = {part.name: part.stages for program in compiled.stages.values() for part in program.tensors if part.stages}
    ranks = {name: tuple(sorted(set(map(compiled.plan.rank_of, stages)))) for name, stages in parts.items()}
    return {name: at for name, at in sorted(ranks.items()) if len(at) > 1}


def carry_hooks(source: SpikeGraph, stage: Stage) -> None:
    """Have gradients go through the hooks of the user's parameters; leaves have copied those of theirs."""
    for name, parameter in stage.parameters():
        part = stage.slices[name]
        if part.leaf is None and name in source.tensors:
            hooks.carry(source.tensors[name].tensor, parameter, part.dim, part.pieces)


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
            yield name, local_part(parameter.grad), sliced and sharded and stage.stands_for(name)


def local_part(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, another tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
