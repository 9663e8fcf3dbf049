"""The end of a train step that the host does not wait for: loss over all ranks, clipping, loss scale, optimizer.

One all-reduce over all ranks sums what decides about the step: the loss, whether inputs or gradients hold NaN or Inf,
and the squares of the gradients. Where one of them is bad, no parameter, no optimizer state and no counter changes:

    fused       torch's fused AdamW, Adam and SGD take the flag as an argument; nothing waits
    capturable  other optimizers that torch can capture have no such argument; they step, and parameters and state are
                put back under the flag
    host        all others: the host reads the flag

What an optimizer begins with (momentum that is not there yet) no flag can take back. So a step that is the first for
some parameter reads the flag on the host; it is never a captured one.

The learning rate is a number in the optimizer's groups, where schedulers and users write it. While a graph is captured
a tensor on the device takes its place; `refresh` gives that tensor the number before each replay. Every other
hyperparameter is part of the captured step: `hyperparameters` changes when one does. One that changes again and again
(betas and momentum, which some schedulers cycle) takes the optimizer's step out of the captured one: `finish` makes it
then, on the same stream, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from snnpart import compat
from snnpart.runtime.engine import Engine
from snnpart.runtime.gradients import local_gradients
from snnpart.runtime.hyperparameters import Hyperparameters
from snnpart.runtime.shards import on_shards

Kind = Literal["none", "fused", "capturable", "host"]
LOSS, BAD_INPUTS, BAD_GRADIENTS, NORM = range(4)
"""Places in what a step reports."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Update:
    """Clipping and the optimizer's step of one launched program."""

    def __init__(self, engine: Engine, notice: Callable[[str], None]) -> None:
        self._engine = engine
        self._rates: list[Tensor] = []
        self._hyperparameters = Hyperparameters(engine.optimizer, notice)
        self._begun: set[int] = set()
        self.has_begun = True
        """False after a step that would have been the first for some parameter, and was not made."""
        self.kind = self._kind()
        self._prepared = False
        self.generation = 0
        """Counts how often the optimizer's state was exchanged, after which nothing that was captured is right."""
        if engine.optimizer is not None:
            engine.optimizer.register_load_state_dict_post_hook(self._loaded)

    def _kind(self) -> Kind:
        optimizer = self._engine.optimizer
        if optimizer is None:
            return "none"
        if type(optimizer) in _FUSED and not any(group["differentiable"] for group in optimizer.param_groups):
            return "fused"
        return "capturable" if "capturable" in optimizer.defaults else "host"

    @property
    def is_captured(self) -> bool:
        """Whether the optimizer's step is part of a captured graph."""
        return self.kind != "host" and not self._hyperparameters.cycle

    def prepare(self) -> None:
        """Have the optimizer compute on the device, with its counters there."""
        self._prepared = True
        optimizer, device = self._engine.optimizer, self._engine.ranks.device
        if optimizer is None or self.kind == "host":
            return
        for group in optimizer.param_groups:
            if self.kind == "fused":
                group["fused"], group["foreach"] = True, False
            if device.type == "cuda" and "capturable" in group:
                group["capturable"] = True
        for state in optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor) and step.device != device:
                state["step"] = step.to(device)

    def _loaded(self, optimizer: Any) -> None:
        self.generation += 1
        self._begun.clear()
        if self._prepared:
            self.prepare()

    def hyperparameters(self) -> tuple[Any, ...]:
        """All that a captured step takes as fixed; a loaded optimizer is made ready again first."""
        self.prepare()
        if self.is_captured:
            self._hyperparameters.look()
        return self.generation, *(self._hyperparameters.now if self.is_captured else ())

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """A block in which the learning rates of the groups are tensors on the device."""
        groups = [] if self._engine.optimizer is None else self._engine.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        self.refresh()
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number

    def refresh(self) -> None:
        """Give the tensors the numbers that the groups hold now."""
        groups = [] if self._engine.optimizer is None else self._engine.optimizer.param_groups
        device = self._engine.ranks.device
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), device=device))
        for group, rate in zip(groups, self._rates, strict=True):
            rate.copy_(group["lr"]) if isinstance(group["lr"], Tensor) else rate.fill_(float(group["lr"]))

    def report(self, loss: Tensor, bad_inputs: Tensor) -> Tensor:
        """What the step reports [4], equal on every rank: loss, bad inputs, bad gradients, norm of the gradients.

        Gradients are unscaled and their squares summed. Collective over all ranks.

        Args:
            loss: [], this rank's part of the loss of all.
            bad_inputs: [], above 0 if its inputs hold NaN or Inf.
        """
        engine, bad = self._engine, torch.zeros((), device=loss.device)
        found = list(local_gradients(engine.stage, engine.ranks))
        grads = [grad for _, grad, _ in found if grad.numel()]
        if engine.precision.scale is not None and grads:
            engine.precision.scale.unscale(grads, bad)
        squares = torch.zeros((), dtype=torch.float64, device=loss.device)
        if engine.settings.clip_grad_norm is not None:
            squares = _square([grad for _, grad, counts in found if counts and grad.numel()], squares)
            bad = torch.maximum(bad, 1.0 - torch.isfinite(squares).float())
            squares = torch.where(torch.isfinite(squares), squares, 0.0)
        numbers = torch.stack([loss.double(), bad_inputs.double(), bad.double(), squares])
        if engine.ranks.world.group is not None:
            dist.all_reduce(numbers, group=engine.ranks.world.group)
        return torch.cat([numbers[:NORM], numbers[NORM:].sqrt()])

    def step(self, report: Tensor) -> None:
        """Clip, and change the parameters where `report` allows it."""
        engine = self._engine
        bad = _bad(report)
        limit = engine.settings.clip_grad_norm
        if limit is not None:
            norm = report[NORM]
            grads = [grad for _, grad, _ in local_gradients(engine.stage, engine.ranks) if grad.numel()]
            compat.multiply(grads, torch.where(norm > limit, limit / (norm + 1e-6), 1.0))
        if engine.optimizer is not None and self.is_captured:
            self._step_optimizer(engine.optimizer, bad)
        if engine.precision.scale is not None:
            engine.precision.scale.update((report[BAD_GRADIENTS] > 0).float(), report[BAD_INPUTS])

    def _step_optimizer(self, optimizer: Any, bad: Tensor) -> None:
        """The step, which changes nothing where `bad` [] is 1."""
        if not self._begins(bad):
            return
        optimizer.found_inf = bad
        try:
            with on_shards(optimizer), self._undoing(optimizer, bad):
                optimizer.step()
        finally:
            del optimizer.found_inf

    def _begins(self, bad: Tensor) -> bool:
        """Whether to step: the host asks before it is the first time for a parameter."""
        new = {id(p) for p in self._engine.parameters() if p.grad is not None} - self._begun
        self.has_begun = not (new and self._may_be_bad and self._engine.on_host(bad))
        if self.has_begun:
            self._begun |= new
        return self.has_begun

    @property
    def _may_be_bad(self) -> bool:
        """Whether anybody looks at inputs or gradients."""
        settings = self._engine.settings
        return settings.check_inputs or settings.clip_grad_norm is not None or self._engine.precision.scale is not None

    @contextmanager
    def _undoing(self, optimizer: torch.optim.Optimizer, bad: Tensor) -> Iterator[None]:
        """A block whose step is put back where `bad` [] is 1, for optimizers that know no flag."""
        if self.kind != "capturable" or not self._may_be_bad:
            yield
            return
        tensors = _changed_by(optimizer)
        before = compat.copies(tensors)
        yield
        compat.put_back(tensors, before, bad)

    def finish(self, report: Tensor) -> None:
        """The optimizer's step where it is no part of the captured one."""
        optimizer = self._engine.optimizer
        if self.is_captured or optimizer is None:
            return
        if self.kind != "host":
            self._step_optimizer(optimizer, _bad(report))
        elif self._engine.on_host(report[BAD_INPUTS] + report[BAD_GRADIENTS]) == 0:
            optimizer.step()


def _bad(report: Tensor) -> Tensor:
    """1 where the step must change nothing []."""
    return (report[BAD_INPUTS] + report[BAD_GRADIENTS] > 0).float()


def _changed_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and state that a step will write."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state[parameter].values()
                found += [parameter.detach(), *(x for x in state if isinstance(x, Tensor))]
    return [x for x in found if x.numel()]


def _square(grads: Sequence[Tensor], zero: Tensor) -> Tensor:
    """The sum of the squares of all numbers, in float64."""
    if not grads:
        return zero
    return torch.stack(compat.norms(grads)).square().sum()
