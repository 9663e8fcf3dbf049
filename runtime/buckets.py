"""Gradients averaged over dp in buckets while the last backward runs, by plain collectives that a graph can capture.

DDP's reducer does the same, and keeps timers, statistics and buckets that it rebuilds, which make a capture depend on
how many steps were taken before it. Here the buckets are made once: the first backward records the order in which
parameters get their gradients, dp rank 0's order is everybody's, and from then on the all-reduce of a bucket starts as
soon as its last gradient is there and all earlier buckets have started. After it gradients are views of the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from snnpart.errors import LaunchError
from snnpart.runtime.collectives import Axis, over_nccl
from snnpart.runtime.reduction import Alone, average
from snnpart.runtime.stage import Stage

SIZE = 25 * 2**20
"""Bytes of a bucket: DDP's default, large enough for the links' bandwidth."""


@dataclass
class _Bucket:
    """Parameters whose gradients travel together, and what is under way."""

    parameters: list[nn.Parameter]
    waiting: int = 0
    flat: Tensor | None = None
    work: Any = None


@dataclass
class _Watch:
    """What the hooks on the parameters see during one backward."""

    order: list[int] = field(default_factory=list)
    armed: bool = False


class Buckets(Alone):
    """The mean over dp of every gradient, in buckets."""

    def __init__(self, stage: Stage, axis: Axis) -> None:
        super().__init__(stage, axis)
        self._learned = [p for p in stage.module.parameters() if p.requires_grad]
        """All dense: `Stage` makes its own copies."""
        self._buckets: list[_Bucket] | None = None
        self._left_out: list[nn.Parameter] = []
        self._place: dict[int, int] = {}
        self._next = 0
        self._watch = _Watch()
        for number, parameter in enumerate(self._learned):
            parameter.register_post_accumulate_grad_hook(self._seen(number))

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None], last: bool) -> None:
        if last:
            self._arm()
        super().backward(roots, grads, last)

    def forget(self) -> None:
        self._buckets, self._watch, self._place = None, _Watch(), {}

    def finish(self) -> None:
        if self._buckets is None:
            self._buckets = self._make()
            self._arm()
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        for bucket in self._buckets:
            self._take_back(bucket)
        average([p.grad for p in self._left_out if p.grad is not None], self.axis)
        self._watch, self._next = _Watch(), 0

    def _seen(self, number: int) -> Any:
        def seen(_: Tensor) -> None:
            self._watch.order.append(number)
            if self._watch.armed:
                self._ready(number)

        return seen

    def _arm(self) -> None:
        """The backward that comes is the step's last one."""
        for bucket in self._buckets or ():
            bucket.waiting = len(bucket.parameters)
        self._watch.armed, self._next = self._buckets is not None, 0

    def _ready(self, number: int) -> None:
        assert self._buckets is not None
        if number in self._place:
            self._buckets[self._place[number]].waiting -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting <= 0:
            self._start(self._buckets[self._next])
            self._next += 1

    def _make(self) -> list[_Bucket]:
        """Buckets in the order in which the first step's gradients came; collective over dp."""
        assert self.axis.group is not None
        order = list(dict.fromkeys(self._watch.order))
        everyone: list[Any] = [None] * self.axis.size
        dist.all_gather_object(everyone, order, group=self.axis.group)
        agreed = list(dict.fromkeys(number for found in everyone for number in found))
        self._left_out = [p for i, p in enumerate(self._learned) if i not in agreed]
        buckets: list[_Bucket] = []
        for number in agreed:
            parameter = self._learned[number]
            if not buckets or not _fits(buckets[-1], parameter):
                buckets.append(_Bucket([]))
            buckets[-1].parameters.append(parameter)
            self._place[number] = len(buckets) - 1
        return buckets

    def _start(self, bucket: _Bucket) -> None:
        """Send the bucket's gradients on their way."""
        missing = [p for p in bucket.parameters if p.grad is None]
        if missing:
            raise LaunchError(
                "the loss of this step does not reach every parameter that the first step's loss reached",
                where=self.stage.place,
                fix="use the same outputs in every loss, or launch again when the loss changes",
            )
        with torch.no_grad():
            bucket.flat = torch.cat([in_memory_order(p.grad, p) for p in bucket.parameters if p.grad is not None])
        mean = dist.ReduceOp.AVG if over_nccl(self.axis, self.stage.device) else dist.ReduceOp.SUM
        bucket.work = dist.all_reduce(bucket.flat, mean, group=self.axis.group, async_op=True)

    def _take_back(self, bucket: _Bucket) -> None:
        """Wait for the bucket's mean; its pieces are the gradients."""
        assert bucket.flat is not None
        bucket.work.wait()
        if not over_nccl(self.axis, self.stage.device):
            bucket.flat.div_(self.axis.size)
        pieces = bucket.flat.split([p.numel() for p in bucket.parameters])
        for parameter, piece in zip(bucket.parameters, pieces, strict=True):
            parameter.grad = piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset())
        bucket.flat = bucket.work = None


def in_memory_order(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient's numbers [numel] in the order in which the parameter lies in memory, as fused optimizers want."""
    if grad.stride() != parameter.stride():
        grad = torch.empty_strided(parameter.size(), parameter.stride(), dtype=grad.dtype, device=grad.device).copy_(
            grad
        )
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())


def _fits(bucket: _Bucket, parameter: nn.Parameter) -> bool:
    first = bucket.parameters[0]
    held = sum(p.numel() * p.element_size() for p in bucket.parameters)
    return first.dtype is parameter.dtype and held + parameter.numel() * parameter.element_size() <= SIZE
