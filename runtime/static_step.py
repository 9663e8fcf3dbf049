"""One train step over tensors that stay where they are: what a CUDA graph holds, and what runs where none is captured.

Nothing in `run` asks the device for a number, the first step apart: weights of microbatches are tensors, the loss stays
on the device, a bad batch is a flag that keeps the optimizer from stepping. So the same code runs eagerly, is captured,
and is tested on the CPU.

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

from snnpart.runtime.batches import read_buffers
from snnpart.runtime.data_parallel import broadcast_buffers
from snnpart.runtime.engine import Engine, LossFn
from snnpart.runtime.feeds import Feed
from snnpart.runtime.pipeline import Part
from snnpart.runtime.training import gradients
from snnpart.runtime.update import Update


class StaticStep:
    """A train step for batches of one kind under one loss function."""

    def __init__(self, engine: Engine, update: Update, inputs: Any, targets: Any, loss_fn: LossFn) -> None:
        """Compiles the graphs for the batch's signature where they are not there yet."""
        self._engine, self._update, self._loss_fn = engine, update, loss_fn
        self._feed = Feed((inputs, targets), engine.ranks.device)
        self._feed.fill((inputs, targets))
        static_inputs, self._targets = self._feed.data
        self._parts = engine.batches.parts(static_inputs, self._targets, engine.training)
        self._read = read_buffers(self._parts, engine.training)
        self._factors: list[float] = []
        self._weights = [torch.zeros((), dtype=torch.float64, device=engine.ranks.device) for _ in self._parts]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._report: Tensor | None = None
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self.runs = 0

    @property
    def sizes(self) -> list[int]:
        """Samples of each microbatch."""
        return [part.size for part in self._parts]

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def fill(self, inputs: Any, targets: Any, factors: Sequence[float]) -> None:
        """The batch of the next step, and what the loss of each microbatch is multiplied by."""
        self._feed.fill((inputs, targets))
        if list(factors) != self._factors:
            self._factors = list(factors)
            for weight, factor in zip(self._weights, self._factors, strict=True):
                weight.fill_(factor)

    def run(self) -> Tensor:
        """Carry the step out; its report."""
        self.runs += 1
        return self._body()

    def _body(self) -> Tensor:
        engine = self._engine
        engine.zero_grad()
        engine.stage.module.train(engine.training)
        broadcast_buffers(engine.stage, engine.ranks.axes["dp"], self._read)
        total = gradients(engine, self._weighted(), self._loss_fn, lambda: self._targets)
        device = engine.ranks.device
        counts = isinstance(total, Tensor) and engine.has_loss
        loss = total / engine.ranks.mesh.dp if counts else torch.zeros((), device=device)
        report = self._update.report(loss, self._bad_inputs())
        self._update.step(report)
        return report

    def _weighted(self) -> list[Part]:
        """The microbatches with their weights: a tensor, or 0.0 for one that does not count."""
        pairs = zip(self._parts, self._factors, self._weights, strict=True)
        return [part.weighing(weight if factor else 0.0) for part, factor, weight in pairs]

    def _bad_inputs(self) -> Tensor:
        """Above 0 if this rank's inputs hold NaN or Inf."""
        zero = torch.zeros((), device=self._engine.ranks.device)
        if not self._engine.settings.check_inputs:
            return zero
        bad = [(~torch.isfinite(x)).any() for part in self._parts for x in part.inputs if x.is_floating_point()]
        return torch.stack(bad).any().float() if bad else zero

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Record the step; nothing is carried out. Raises what the capture raises."""
        engine = self._engine
        engine.zero_grad()
        graph = torch.cuda.CUDAGraph()
        if engine.stage.generator is not None:
            graph.register_generator_state(engine.stage.generator)
        with (
            self._update.rates_on_device(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            report = self._body()
        self._graph, self._report = graph, report
        self._grads = [(parameter, parameter.grad) for parameter in engine.parameters()]

    def replay(self) -> Tensor:
        """Carry out what was recorded; its report, which the next replay overwrites."""
        assert self._graph is not None and self._report is not None
        self._update.refresh()
        self._graph.replay()
        for parameter, grad in self._grads:
            parameter.grad = grad
        return self._report
