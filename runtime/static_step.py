"""One train step over tensors that stay where they are: what a CUDA graph holds, and what runs where none is captured.

Nothing in it asks the device for a number, the first step apart: weights of microbatches are tensors, the loss stays
on the device, a bad batch is a flag that keeps the optimizer from stepping and has buffers put back. So the same code
runs eagerly, is captured, and is tested on the CPU.

    fill     the batch and the weights are copied to where the step reads them
    run      zero_grad, buffers, forward, backward, collectives, clipping, optimizer: the report [4] (see `update`)
    capture  `run`, recorded instead of carried out
    replay   what was recorded, with the gradients it leaves on the parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snnpart import compat
from snnpart.runtime.batches import read_buffers, written_buffers
from snnpart.runtime.captures import StaticPass
from snnpart.runtime.data_parallel import broadcast_buffers
from snnpart.runtime.engine import Engine, LossFn
from snnpart.runtime.feeds import Feed
from snnpart.runtime.pipeline import Part
from snnpart.runtime.training import gradients
from snnpart.runtime.update import BAD_INPUTS, Update


class StaticStep(StaticPass):
    """A train step for batches of one kind under one loss function."""

    def __init__(self, engine: Engine, update: Update, inputs: Any, targets: Any, loss_fn: LossFn) -> None:
        """Compiles the graphs for the batch's signature where they are not there yet."""
        super().__init__(engine)
        self._update, self._loss_fn = update, loss_fn
        self._feed = Feed((inputs, targets), engine.ranks.device)
        self._feed.fill((inputs, targets))
        static_inputs, self._targets = self._feed.data
        self._parts = engine.batches.parts(static_inputs, self._targets, engine.training)
        self._read = read_buffers(self._parts, engine.training)
        self._written = written_buffers(self._parts)
        self._factors: list[float] = []
        self._weights = [torch.zeros((), dtype=torch.float64, device=engine.ranks.device) for _ in self._parts]
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self._parts]

    def fill(self, inputs: Any, targets: Any, factors: Sequence[float]) -> None:
        """The batch of the next step, and what the loss of each microbatch is multiplied by."""
        self._feed.fill((inputs, targets))
        if list(factors) != self._factors:
            self._factors = list(factors)
            for weight, factor in zip(self._weights, self._factors, strict=True):
                weight.fill_(factor)

    def run(self) -> Tensor:
        """As any pass; one whose optimizer could not begin with some parameter does not make it ready for capture."""
        report: Tensor = super().run()
        if not self._update.has_begun:
            self.runs = 0
        return report

    def _body(self) -> Tensor:
        engine = self._engine
        engine.zero_grad()
        buffers = self._buffers()
        before = compat.copies(buffers)
        engine.stage.module.train(engine.training)
        engine.stale = True
        with engine.heartbeat.guard("agreeing on buffers", engine.stage.place, shared=True):
            broadcast_buffers(engine.stage, engine.ranks.axes["dp"], self._read)
        total = gradients(engine, self._weighted(), self._loss_fn, lambda: self._targets)
        loss = torch.zeros((), device=engine.ranks.device)
        if isinstance(total, Tensor) and engine.has_loss:
            loss = total / engine.ranks.mesh.dp
        with engine.heartbeat.guard("agreeing on loss and gradients", engine.stage.place, shared=True):
            report = self._update.report(loss, engine.bad_inputs(self._parts))
        compat.put_back(buffers, before, report[BAD_INPUTS])
        self._update.step(report)
        return report

    def _buffers(self) -> list[Tensor]:
        """What inputs that are not finite must not change: eager steps look at them before they begin."""
        if not self._engine.settings.check_inputs:
            return []
        held = {id(x): x for name, x in self._engine.stage.buffers() if name in self._written and x.numel()}
        return list(held.values())

    def _weighted(self) -> list[Part]:
        """The microbatches with their weights: a tensor, or 0.0 for one that does not count."""
        pairs = zip(self._parts, self._factors, self._weights, strict=True)
        return [part.weighing(weight if factor else 0.0) for part, factor, weight in pairs]

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._engine.zero_grad()
        with self._update.rates_on_device():
            super().capture(stream, pool)
        self._grads = [(parameter, parameter.grad) for parameter in self._engine.parameters()]

    def replay(self) -> Tensor:
        self._update.refresh()
        self._engine.stale = True
        report: Tensor = super().replay()
        for parameter, grad in self._grads:
            parameter.grad = grad
        return report
