"""Data parallelism around a stage: gradients are reduced in the last microbatch's backward.

DDP expects one forward and one backward a step, a pipeline has several in flight. So, as torch.distributed.pipelining
does: every backward but the last only accumulates, the last one reduces. FSDP2 has a page of its own (`fsdp2`).

DDP is built when the first backward is at hand: only then is it known which parameters the loss reaches. Its forward is
never called; the buffers are broadcast by `broadcast_buffers` before a step instead of inside it, where a write would
disturb the microbatches in flight.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from snnpart import compat
from snnpart.errors import LaunchError
from snnpart.plan import Plan
from snnpart.runtime.buckets import Buckets
from snnpart.runtime.collectives import Axis
from snnpart.runtime.fsdp2 import Fsdp2
from snnpart.runtime.reduction import Alone, average, fused
from snnpart.runtime.stage import Stage


class Ddp(Alone):
    """Gradients averaged by DistributedDataParallel's buckets while the last backward runs."""

    def __init__(self, stage: Stage, axis: Axis) -> None:
        super().__init__(stage, axis)
        self._ddp: DistributedDataParallel | None = None
        self._left_out: list[nn.Parameter] | None = None

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None], last: bool) -> None:
        ddp = self._wrap(roots) if last else None
        if ddp is not None:
            compat.ddp_expect_backward(ddp, roots)
        super().backward(roots, grads, last)

    def forget(self) -> None:
        self._ddp, self._left_out = None, None
        gc.collect()  # the old reducer takes its hooks off the parameters when it goes

    def finish(self) -> None:
        if self._ddp is not None and not compat.ddp_finished(self._ddp):
            raise LaunchError(
                "the loss of this step does not reach every parameter that the first step's loss reached",
                where=self.stage.place,
                fix="use the same outputs in every loss, or launch again when the loss changes",
            )
        average([p.grad for p in self._left_out or () if p.grad is not None], self.axis)

    def _wrap(self, roots: Sequence[Tensor]) -> DistributedDataParallel | None:
        """DDP around the parameters that the roots of the first step reach; None when they reach none.

        Those it leaves out are averaged in `finish` should a later loss reach them.
        """
        if self._left_out is None:
            module, reached = self.stage.module, _reached(roots)
            learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
            unused = {name for name, p in learned.items() if id(p) not in reached}
            self._left_out = [learned[name] for name in unused]
            if len(unused) < len(learned):
                compat.ddp_ignore(module, unused | {name for name, _ in module.named_buffers()})
                self._ddp = compat.ddp_around(module, self.axis.group)
        return self._ddp


class Once(Alone):
    """Gradients averaged by one all-reduce for each dtype after the last backward.

    For ranks with several stages, where no backward of a step reaches all parameters, and for backward in halves,
    which does not fire DDP's hooks.
    """

    def finish(self) -> None:
        average([p.grad for p in self.stage.module.parameters() if p.grad is not None], self.axis)


def data_parallel(plan: Plan, stage: Stage, axis: Axis, *, static: bool = False) -> Alone:
    """The form of data parallelism that the plan asks for; none where the axis has one rank.

    `static`: for steps that may be captured.
    """
    if axis.size == 1:
        return Alone(stage, axis)
    if plan.dp == "ddp" and static:
        return Buckets(stage, axis)
    if plan.dp == "ddp" and (plan.stages_per_rank > 1 or plan.splits_backward):
        return Once(stage, axis)
    return Fsdp2(stage, axis, reshard=plan.reshard) if plan.dp == "fsdp2" else Ddp(stage, axis)


def broadcast_buffers(stage: Stage, axis: Axis, names: Container[str] | None = None) -> None:
    """Give every dp rank the buffers of dp rank 0, as DDP does before a forward; `names`: only these."""
    if axis.group is None:
        return
    with torch.no_grad():
        fused(
            [buffer for name, buffer in stage.buffers() if names is None or name in names],
            lambda flat: dist.broadcast(flat, src=axis.ranks[0], group=axis.group),
        )


def _reached(roots: Sequence[Tensor]) -> set[int]:
    """Ids of the leaf tensors that backward from the roots will reach."""
    seen: set[Any] = set()
    found: set[int] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    found.update(id(root) for root in roots if root.grad_fn is None and root.requires_grad)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(parent for parent, _ in node.next_functions)
    return found
