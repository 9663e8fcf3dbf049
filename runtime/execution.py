"""How steps run: eagerly, or as static passes that a CUDA graph holds once they have run a few times.

    eager        every step is made anew, with its checks on the host (`training`, `evaluation`)
    cuda_graph   a pass for each kind of batch (`static_step`, `static_forward`): it runs uncaptured a few times, which
                 are ordinary steps, is then captured, and from then on replayed
    compile      eager, with the stage graphs compiled by torch.compile
    auto         cuda_graph on CUDA where a step can be captured, else eager

Before each step the ranks agree on the CPU that all have a batch, that nobody has a problem, and whether all have the
step captured; the device goes on working meanwhile. What a step reports is read two steps later, so that at most two
are under way. A kind of batch that comes rarely (the last one of an epoch) just runs, with the same result.

Steps that cannot be captured (state carried between steps, windows of time, training without an optimizer) run eagerly.
A capture that fails on any rank is given up on all, with one notice.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.runtime.captures import Captures, StaticPass
from snnpart.runtime.engine import Engine, LossFn
from snnpart.runtime.evaluation import evaluate, judged
from snnpart.runtime.feeds import kind_of
from snnpart.runtime.heartbeat import DEVICE
from snnpart.runtime.losses import MEAN, Reduction
from snnpart.runtime.static_forward import StaticForward
from snnpart.runtime.static_step import StaticStep
from snnpart.runtime.training import train_step
from snnpart.runtime.update import BAD_GRADIENTS, BAD_INPUTS, LOSS, NORM, Update

AHEAD = 2
"""Steps that may be under way on the device."""


@dataclass
class _Flight:
    """A step under way: what it is called, what it will report [4], and when that is there (None: it is)."""

    name: str
    report: Tensor
    done: torch.cuda.Event | None


class Execution:
    """Runs the steps of one launched program."""

    def __init__(self, engine: Engine, notice: Callable[[str], None]) -> None:
        self._engine, self._notice = engine, notice
        self.update, self.captures = Update(engine, notice), Captures(engine, notice)
        self.paused = False
        """While set, steps run eagerly: for checks that must leave no trace."""
        self._trains = engine.settings.is_static(engine.ranks.device)
        self._evaluates = engine.settings.evaluates_static(engine.ranks.device)
        if self._trains or engine.precision.scale is not None:
            self.update.prepare()
        self._say()
        self._counts = {"train step": 0, "evaluation": 0}
        self._flights: deque[_Flight] = deque()

    def _say(self) -> None:
        """What is not as it was asked for."""
        engine, captures = self._engine, self.captures.stream is not None
        if engine.settings.execution == "cuda_graph" and not captures:
            self._notice("execution='cuda_graph' captures nothing on the CPU: its steps run uncaptured")
        if engine.settings.execution == "cuda_graph" and not self._trains and engine.settings.optimizer is not None:
            self._notice(f"execution='cuda_graph' runs train steps eagerly: {engine.settings.why_eager}")
        if captures and self._trains and not self.update.is_captured:
            name = type(engine.optimizer).__name__
            self._notice(f"the step of {name} cannot be captured: it runs after the captured part of each train step")

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn, reset_mask: Tensor | None) -> Tensor:
        """One step; see `RunningProgram.train_step`."""
        with self.captures.on_stream():
            if not self._trains or self.paused:
                return train_step(self._engine, self.update, inputs, targets, loss_fn, reset_mask)
            _refuse_mask(reset_mask)
            report = self._train(inputs, targets, loss_fn)
        values = report.clone()
        self._engine.grad_norm = values[NORM] if self._engine.settings.clip_grad_norm is not None else None
        self._take_off("train step", values)
        return values[LOSS]

    def eval_step(self, inputs: Any, targets: Any, loss_fn: LossFn | None, reset_mask: Tensor | None) -> Any:
        """One evaluation; see `RunningProgram.eval_step`."""
        if not self._evaluates or self.paused:
            self.settle()
            with self.captures.on_stream():
                return evaluate(self._engine, inputs, targets, loss_fn, reset_mask)
        _refuse_mask(reset_mask)
        with self.captures.on_stream():
            outputs, bad, share_of_all = self._evaluate(inputs)
        zero = torch.zeros_like(bad)
        self._take_off("evaluation", torch.stack([zero, bad, zero, zero]))
        return judged(self._engine, outputs, targets, loss_fn, share_of_all)

    def _train(self, inputs: Any, targets: Any, loss_fn: LossFn) -> Tensor:
        """A static train step; its report [4]."""
        engine, reduction = self._engine, self._engine.settings.reduction
        engine.check_open()
        self._land(AHEAD - 1)

        def find() -> tuple[StaticPass, list[float]]:
            if engine.steps == 0 and engine.settings.check_inputs:
                engine.batches.check(inputs)  # the first step looks at what it computes with
            fixed = (engine.training, identity(loss_fn), self.update.hyperparameters())
            key = ("train", kind_of(inputs), kind_of(targets), *fixed)
            step = self.captures.find(key, lambda: StaticStep(engine, self.update, inputs, targets, loss_fn))
            return step, engine.batches.weights(step.sizes, targets, reduction)

        with engine.heartbeat.guard("agreeing on the batch", "start of a step", shared=True):
            step, factors, _, ready, willing = self._agree(find, reduction)
        assert isinstance(step, StaticStep)
        step.fill(inputs, targets, factors)
        report: Tensor = self._carry_out(step, ready, willing)
        self.update.finish(report)
        return report

    def _evaluate(self, inputs: Any) -> tuple[Any, Tensor, float]:
        """A static evaluation: outputs, how many ranks' inputs are bad [], and this rank's share of all samples."""
        engine = self._engine
        engine.check_open()
        self._land(AHEAD - 1)

        def find() -> tuple[StaticPass, list[float]]:
            step = self.captures.find(("evaluate", kind_of(inputs)), lambda: StaticForward(engine, inputs))
            return step, [float(size) for size in step.sizes]

        with engine.heartbeat.guard("agreeing on the batch", "start of an evaluation", shared=True):
            step, _, total, ready, willing = self._agree(find, MEAN)
        assert isinstance(step, StaticForward)
        step.fill(inputs)
        if engine.stale:
            engine.start(training=False)
        flat, bad = self._carry_out(step, ready, willing)
        return step.structured([x.clone() for x in flat]), bad.clone(), sum(step.sizes) / total

    def _carry_out(self, step: StaticPass, ready: bool, willing: bool) -> Any:
        """Replay the pass; or capture it first; or run it."""
        captured = ready or (willing and self.captures.capture(step))
        return step.replay() if captured else step.run()

    def _agree(
        self, find: Callable[[], tuple[StaticPass, list[float]]], reduction: Reduction
    ) -> tuple[StaticPass, list[float], float, bool, bool]:
        """The pass for this batch, what the loss of each microbatch is multiplied by, the samples of all dp ranks,
        whether all ranks have the pass captured, and whether all may capture it.

        `find` gives this rank's pass and the weights of its microbatches. One that does not count is not captured.
        """
        problem: Exception | None = None
        step: StaticPass | None = None
        weights: list[float] = []
        try:
            step, weights = find()
        except Exception as error:  # the user's own too: what stops one rank must stop all before they communicate
            problem = error
        ready = step is not None and step.is_captured and all(weights)
        willing = ready or (step is not None and self.captures.may_capture(step) and all(weights))
        size = 0 if step is None else sum(step.sizes)
        counts = [not ready, not willing]
        factors, total, (unready, unwilling) = self._engine.batches.agree(problem, size, weights, reduction, counts)
        assert step is not None
        return step, factors, total, not unready, not unwilling

    def _take_off(self, kind: str, values: Tensor) -> None:
        """Note what a step reports, without waiting for it; on the CPU it is there already."""
        self._counts[kind] += 1
        name = f"{kind} {self._counts[kind]}"
        if self.captures.stream is None:
            self._flights.append(_Flight(name, values, None))
            self.settle()
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._flights.append(_Flight(name, host, done))

    def settle(self) -> None:
        """Wait for all steps under way, and raise what they report.

        Raises:
            ConfigError: inputs of a step held NaN or Inf. LaunchError: its gradients did.
        """
        self._land(0)

    def _land(self, left: int) -> None:
        """Wait until at most `left` steps are under way, and look at what the others report."""
        while len(self._flights) > left:
            flight = self._flights.popleft()
            if flight.done is not None:
                with self._engine.heartbeat.within(f"{DEVICE}, in a captured step"):
                    flight.done.synchronize()
            try:
                _check(flight, self._engine.precision.scale is not None)
            except Exception:
                self._flights.clear()
                raise

    def close(self) -> None:
        """Forget what is under way, and drop all graphs."""
        self._flights.clear()
        self.captures.close()


def _check(flight: _Flight, scaled: bool) -> None:
    """Raise what a step reports, which is the same on all ranks of a train step; a loss scale expects bad gradients."""
    if flight.report[BAD_INPUTS] > 0:
        raise ConfigError(
            f"the inputs of {flight.name} hold NaN or Inf",
            fix="look at the data, or launch with check_inputs=False; execution='eager' names the rank",
        )
    if flight.report[BAD_GRADIENTS] > 0 and not scaled:
        raise LaunchError(
            f"the gradients of {flight.name} hold NaN or Inf",
            fix="lower the learning rate or scale the loss; execution='eager' names the parameters",
        )


def _refuse_mask(reset_mask: Tensor | None) -> None:
    if reset_mask is not None:
        raise ConfigError("reset_mask= needs a program whose state is carried", fix='compile with state="carry"')


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
