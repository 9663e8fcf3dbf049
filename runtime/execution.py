"""How train steps run: eagerly, or as static steps that a CUDA graph holds once they have run a few times.

    eager        every step is made anew, with its checks on the host (`training`)
    cuda_graph   a step for each kind of batch (`static_step`): it runs uncaptured the first `WARM` times, which are
                 ordinary train steps, is then captured, and from then on replayed
    compile      eager, with the stage graphs compiled by torch.compile
    auto         cuda_graph on CUDA where a step can be captured, else eager

Before each step the ranks agree on the CPU that all have a batch, that nobody has a problem, and whether all have the
step captured; the device goes on working meanwhile. What a step reports is read two steps later, so that at most two
are under way. A kind of batch that comes rarely (the last one of an epoch) just runs, with the same result.

Steps that cannot be captured (state carried between steps, windows of time, no optimizer) run eagerly. A capture that
fails on any rank is given up on all, with one notice.
"""

from __future__ import annotations

import atexit
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.runtime.engine import Engine, LossFn
from snnpart.runtime.feeds import kind_of
from snnpart.runtime.static_step import StaticStep
from snnpart.runtime.training import train_step
from snnpart.runtime.update import BAD_GRADIENTS, BAD_INPUTS, LOSS, NORM, Update

WARM = 3
"""Steps before a capture: they start NCCL's communicators, choose algorithms, make the optimizer's state."""
KEPT = 8
"""Kinds of batches whose steps are kept."""
AHEAD = 2
"""Steps that may be under way on the device."""


_open: weakref.WeakSet[Execution] = weakref.WeakSet()
"""Executions whose graphs must go before the process does."""


@atexit.register
def _close_all() -> None:
    for execution in list(_open):
        execution.close()


@dataclass
class _Flight:
    """A step under way: its number, what it will report, and when that is there (None: it is)."""

    number: int
    report: Tensor
    done: torch.cuda.Event | None


class Execution:
    """Runs the train steps of one launched program."""

    def __init__(self, engine: Engine, notice: Callable[[str], None]) -> None:
        self._engine, self._notice = engine, notice
        self.update = Update(engine)
        self.paused = False
        """While set, steps run eagerly: for checks that must leave no trace."""
        self._static = engine.settings.is_static(engine.ranks.device)
        self._capturing = self._static and engine.ranks.device.type == "cuda"
        if self._static or engine.precision.scale is not None:
            self.update.prepare()
        self._say()
        if self._capturing:
            _open.add(self)
        self._count = 0
        self._steps: OrderedDict[Hashable, StaticStep] = OrderedDict()
        self._flights: deque[_Flight] = deque()
        self._stream = torch.cuda.Stream(engine.ranks.device) if self._capturing else None
        self._pool = torch.cuda.graph_pool_handle() if self._capturing else None

    def _say(self) -> None:
        """What is not as it was asked for."""
        engine = self._engine
        if engine.settings.execution == "cuda_graph" and not self._static:
            self._notice(f"execution='cuda_graph' runs eagerly: {engine.settings.why_eager}")
        elif engine.settings.execution == "cuda_graph" and not self._capturing:
            self._notice("execution='cuda_graph' captures nothing on the CPU: its steps run uncaptured")
        if self._capturing and not self.update.is_captured:
            name = type(engine.optimizer).__name__
            self._notice(f"the step of {name} cannot be captured: it runs after the captured part of each train step")

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn, reset_mask: Tensor | None) -> Tensor:
        """One step; see `RunningProgram.train_step`."""
        with self._on_stream():
            if not self._static or self.paused:
                return train_step(self._engine, self.update, inputs, targets, loss_fn, reset_mask)
            if reset_mask is not None:
                raise ConfigError(
                    "reset_mask= needs a program whose state is carried", fix='compile with state="carry"'
                )
            report = self._static_step(inputs, targets, loss_fn)
        values = report.clone()
        self._take_off(values)
        return values[LOSS]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A block on the capture stream: gradients, buckets and communicators must know no other one."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def _static_step(self, inputs: Any, targets: Any, loss_fn: LossFn) -> Tensor:
        engine = self._engine
        engine.check_open()
        self._land(AHEAD - 1)
        with engine.heartbeat.guard("agreeing on the batch", "start of a step", shared=True):
            step, factors, ready, willing = self._agree(inputs, targets, loss_fn)
        step.fill(inputs, targets, factors)
        captured = ready or (willing and self._capture(step))
        self._count += 1
        report = step.replay() if captured else step.run()
        self.update.step_on_host(report)
        return report

    def _agree(self, inputs: Any, targets: Any, loss_fn: LossFn) -> tuple[StaticStep, list[float], bool, bool]:
        """The step for this batch, the weights of its microbatches, whether all ranks have it captured, and whether
        all may capture it."""
        problem: Exception | None = None
        step: StaticStep | None = None
        sizes: list[int] = []
        weights: list[float] = []
        try:
            step = self._step_for(inputs, targets, loss_fn)
            sizes = step.sizes
            weights = self._engine.batches.weights(sizes, targets, self._engine.settings.reduction)
        except Exception as error:  # the user's own too: what stops one rank must stop all before they communicate
            problem = error
        ready = step is not None and step.is_captured
        willing = ready or (step is not None and self._capturing and step.runs >= WARM)
        factors, _, (unready, unwilling) = self._engine.batches.agree(
            problem, sum(sizes), weights, self._engine.settings.reduction, [not ready, not willing]
        )
        assert step is not None
        return step, factors, not unready, not unwilling

    def _step_for(self, inputs: Any, targets: Any, loss_fn: LossFn) -> StaticStep:
        engine = self._engine
        fixed = (engine.training, identity(loss_fn), self.update.hyperparameters())
        key = (kind_of(inputs), kind_of(targets), *fixed)
        if key not in self._steps:
            if len(self._steps) == KEPT:
                self._notice(f"more than {KEPT} kinds of batches, losses or hyperparameters: the oldest is dropped")
                self._steps.popitem(last=False)
            self._steps[key] = StaticStep(engine, self.update, inputs, targets, loss_fn)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _capture(self, step: StaticStep) -> bool:
        """Capture the step on every rank; False, with a notice, when one of them could not."""
        problem = ""
        if not step.is_captured:
            assert self._stream is not None
            try:
                step.capture(self._stream, self._pool)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        found = [(rank, text) for rank, text in enumerate(self._engine.ranks.gather(problem)) if text]
        if not found:
            return True
        rank, text = found[0]
        self._capturing = False
        self._steps.clear()
        self._engine.zero_grad()
        self._engine.stage.reset()
        self._engine.broken = False
        self._notice(f"train steps run uncaptured: the capture failed on rank {rank} with {text}")
        return False

    def _take_off(self, values: Tensor) -> None:
        """Note what the step reports, without waiting for it; on the CPU it is there already."""
        self._engine.grad_norm = values[NORM] if self._engine.settings.clip_grad_norm is not None else None
        if self._stream is None:
            self._flights.append(_Flight(self._count, values, None))
            self.settle()
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._flights.append(_Flight(self._count, host, done))

    def close(self) -> None:
        """Drop all captured steps: NCCL does not end a communicator that a graph still uses, it waits for ever."""
        if self._stream is not None:
            torch.cuda.synchronize(self._engine.ranks.device)
        self._flights.clear()
        self._steps.clear()

    def settle(self) -> None:
        """Wait for all steps under way, and raise what they report.

        Raises:
            ConfigError: inputs of a step held NaN or Inf. LaunchError: its gradients did.
        """
        self._land(0)

    def _land(self, left: int) -> None:
        """Wait until at most `left` steps are under way, and look at what the others report: the same on all ranks."""
        while len(self._flights) > left:
            flight = self._flights.popleft()
            if flight.done is not None:
                with self._engine.heartbeat.within("waiting for the device, a captured step"):
                    flight.done.synchronize()
            if self._engine.settings.check_inputs and flight.report[BAD_INPUTS] > 0:
                self._flights.clear()
                raise ConfigError(
                    f"the inputs of train step {flight.number} hold NaN or Inf",
                    fix="look at the data, or launch with check_inputs=False; execution='eager' names the rank",
                )
            if self._engine.precision.scale is None and flight.report[BAD_GRADIENTS] > 0:
                self._flights.clear()
                raise LaunchError(
                    f"the gradients of train step {flight.number} hold NaN or Inf",
                    fix="lower the learning rate or scale the loss; execution='eager' names the parameters",
                )


def identity(function: Any) -> Hashable:
    """Equal for two functions that compute the same: one defined anew with the same code over the same objects is."""
    if isinstance(function, partial):
        return identity(function.func), tuple(map(id, function.args)), tuple(map(id, function.keywords.values()))
    if isinstance(function, types.MethodType):
        return identity(function.__func__), id(function.__self__)
    if not isinstance(function, types.FunctionType):
        return id(function)
    cells = tuple(_content(cell) for cell in function.__closure__ or ())
    return function.__code__, cells, tuple(map(id, function.__defaults__ or ()))


def _content(cell: Any) -> Hashable:
    try:
        return id(cell.cell_contents)
    except ValueError:  # not bound yet
        return None
