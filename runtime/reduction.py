"""What every form of data parallelism does around a stage's backward, and averages over dp in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snnpart.runtime.collectives import Axis
from snnpart.runtime.stage import Stage


class Alone:
    """dp = 1: nothing to reduce. The base of the others."""

    def __init__(self, stage: Stage, axis: Axis) -> None:
        self.stage, self.axis = stage, axis

    def prepare(self, half: torch.dtype | None) -> None:
        """Called before a pass over the microbatches, under autocast to `half` or none."""

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None], last: bool) -> None:
        """Backward of one microbatch; `last` when no other follows in this step."""
        torch.autograd.backward(list(roots), list(grads))

    @contextmanager
    def in_pieces(self) -> Iterator[None]:
        """A block in which autograd is called itself, any number of times, for one microbatch's backward: each
        parameter gets its gradient once. Another microbatch's follows in this step, or nothing is reduced before
        `finish`."""
        yield

    def finish(self) -> None:
        """After the last backward: all gradients are the mean over dp."""

    def rest(self) -> None:
        """Put parameters into the form the optimizer and the state see."""

    def forget(self) -> None:
        """Forget which parameters earlier losses reached: the next one may be another."""


def average(tensors: Iterable[Tensor], axis: Axis) -> None:
    """Replace each tensor by its mean over the axis."""
    fused(tensors, lambda flat: (dist.all_reduce(flat, group=axis.group), flat.div_(axis.size)))


def fused(tensors: Iterable[Tensor], communicate: Callable[[Tensor], Any]) -> None:
    """Change tensors in place by one communication for each dtype: flattened, communicated, copied back."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, group in by_type.items():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        wire = flat.view(torch.uint8) if dtype is torch.bool else flat
        communicate(wire)
        for tensor, new in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.detach().copy_(new.view_as(tensor))
