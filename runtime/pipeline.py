"""The pipeline executor: carries out a rank's actions, forward and backward of microbatches, in the order given.

Torch's schedules give the order (`program.Action`); sending and receiving is done here (`channels`), because a spiking
network needs what torch's stages refuse: microbatches of different sizes, several outputs, views, values without a
gradient, and values that only pass through a stage.

Every message's shape is known to both sides beforehand, from the port's shape at the example batch and the microbatch's
size. A value that carries no gradient has no message back. A batch with fewer samples than the plan has microbatches
runs the actions of those it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.plan import Plan
from snnpart.program import Action, Port, StageProgram
from snnpart.runtime.channels import Channels, Message, Spec, Way, WireTypes, message_of
from snnpart.runtime.heartbeat import Heartbeat
from snnpart.runtime.losses import Merged
from snnpart.runtime.precision import Precision
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.reduction import Alone
from snnpart.runtime.split_backward import Halves
from snnpart.runtime.stage import BoundStage, Stage


@dataclass(frozen=True)
class Part:
    """One microbatch: its size, weight in the loss, inputs, targets, and the bound graphs of this rank's stages.

    A weight of 0.0 leaves the loss out; a weight that may differ when the same work is done again is a tensor [].
    """

    size: int
    weight: float | Tensor
    bound: Mapping[int, BoundStage]
    inputs: list[Tensor]
    targets: Any = None
    number: int = 0

    def weighing(self, weight: float | Tensor) -> Part:
        """The same microbatch with another weight."""
        return replace(self, weight=weight)

    def specs(self, stage: int, ports: Sequence[Port], dtypes: Sequence[torch.dtype]) -> list[Spec]:
        """What the ports' values are for this microbatch, on their way forward."""
        grown = self.size - self.bound[stage].batch
        return [Spec(p.name, p.value.shape_at(grown), d, p.states) for p, d in zip(ports, dtypes, strict=True)]

    def specs_back(self, stage: int, ports: Sequence[Port], dtypes: Sequence[torch.dtype]) -> list[Spec]:
        """What the gradients are that come back for the ports."""
        forward = self.specs(stage, ports, dtypes)
        return [replace(s, states=None) for p, s in zip(ports, forward, strict=True) if _carries_gradient(p)]


@dataclass(frozen=True)
class _Contents:
    """What messages into this rank hold (`channels.Contents`): values of the microbatches' graphs."""

    parts: Sequence[Part]
    types: WireTypes

    def _at(self, message: Message) -> tuple[StageProgram, Way]:
        program = self.parts[message.microbatch].bound[message.stage].program
        return program, "receives" if message.kind == "F" else "sends"

    def specs(self, message: Message) -> list[Spec]:
        program, way = self._at(message)
        part, dtypes = self.parts[message.microbatch], self.types.of(program, way)
        assert dtypes is not None
        if message.kind == "F":
            return part.specs(message.stage, program.receives, dtypes)
        return part.specs_back(message.stage, program.sends, dtypes)

    def announced(self, message: Message) -> bool:
        """A gradient has the dtype of its value, which went out before."""
        program, way = self._at(message)
        return message.kind == "F" and self.types.of(program, way) is None

    def count(self, message: Message) -> int:
        return len(self._at(message)[0].receives)

    def learn(self, message: Message, dtypes: Sequence[torch.dtype]) -> None:
        self.types.learn(*self._at(message), dtypes)


@dataclass
class _Flight:
    """What a microbatch leaves between its forward and its backward on a stage."""

    received: list[Tensor]
    outputs: list[Tensor]
    halves: Halves | None = None


@dataclass
class Pipeline:
    """This rank's side of the pipeline for one pass over its microbatches.

    `loss` turns (flat outputs, part) into the microbatch's loss on the last stage; None: forward only. `merged` takes
    its place where the loss is of all microbatches together. `check` looks whether what travels as bits may do so.
    `types` are kept from pass to pass. `first`: one of the first passes of its kind (`first_passes`).
    """

    ranks: Ranks
    plan: Plan
    stage: Stage
    parallel: Alone
    heartbeat: Heartbeat
    parts: Sequence[Part]
    precision: Precision
    types: WireTypes
    loss: Callable[[Sequence[Tensor], Part], Tensor] | None = None
    merged: Merged | None = None
    check: bool = False
    first: bool = False
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    total: float | Tensor = 0.0
    _of_merged: list[list[Tensor | None]] | None = None
    _flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)

    def run(self, schedule: Mapping[int, Sequence[Action]]) -> None:
        """Carry out this rank's actions. On the last stage `outputs` (forward only) or `total` (the loss) is then set.

        `schedule` has every pipeline rank's actions: what the others do says which messages come, and in which order.
        """
        wanted = "F" if self.loss is None else "FBIW"
        cut = {
            rank: [a for a in actions if a.microbatch < len(self.parts) and a.kind in wanted]
            for rank, actions in schedule.items()
        }
        contents = _Contents(self.parts, self.types)
        self._channels = Channels(self.ranks, self.plan, cut, contents, through_host=self.first)
        actions = cut[self.ranks.axes["pp"].index]
        left = sum(action.kind in "BW" for action in actions)
        for action in actions:
            left -= action.kind in "BW"
            self._carry_out(action, last=left == 0)
        with self._at("sending", None):
            self._channels.wait()

    def _carry_out(self, action: Action, last: bool) -> None:
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "B":
            self._backward(action, last)
        elif action.kind == "I":
            self._backward_of_inputs(action)
        else:
            self._backward_of_weights(action)

    def _forward(self, action: Action) -> None:
        part = self.parts[action.microbatch]
        bound = part.bound[action.stage]
        received = self._receive(action, bound)
        with self._at("forward", action), self.precision.autocast():
            outputs = list(self.stage.forward(bound, part.inputs, received, part.size, part.number))
        message = message_of(action, self.plan.stage_count - 1)
        if message is not None:
            with self._at("sending activations", action):
                self._send(message, bound.program, part, outputs)
        elif self.loss is None or self.merged is not None:
            self.outputs[action.microbatch] = tuple(outputs)
        else:
            with self._at("the loss", action), self.precision.autocast():
                outputs = [self._weighted_loss(outputs, part)]
        if self.loss is not None:
            self._flights[action.stage, action.microbatch] = _Flight(received, outputs)

    def _send(self, message: Message, program: StageProgram, part: Part, outputs: Sequence[Tensor]) -> None:
        """Send a stage's values on. Two stages of one rank need no dtypes beforehand, but keep them."""
        new = self.types.of(program, "sends") is None
        if new:
            self.types.learn(program, "sends", [x.dtype for x in outputs])
        dtypes = self.types.of(program, "sends")
        assert dtypes is not None
        specs = part.specs(message.stage - 1, program.sends, dtypes)
        _check_sent(outputs, program.sends, specs, self.check)
        self._channels.send(message, outputs, specs, announce=new)

    def _receive(self, action: Action, bound: BoundStage) -> list[Tensor]:
        if action.stage == 0:
            return []
        with self._at("receiving activations", action):
            received = self._channels.take(Message("F", action.stage, action.microbatch))
        if self.loss is not None:
            for port, tensor in zip(bound.program.receives, received, strict=True):
                tensor.requires_grad_(_carries_gradient(port))
        return received

    def _weighted_loss(self, outputs: Sequence[Tensor], part: Part) -> Tensor:
        assert self.loss is not None
        loss = _one_number(self.loss(outputs, part))
        if not loss.requires_grad and any(x.requires_grad for x in outputs):
            raise ConfigError(
                "the loss has no gradient, though the outputs have one",
                fix="do not detach the outputs in loss_fn, or turn them into numbers",
            )
        loss = _nothing(outputs) if _is_zero(part.weight) else weighted(loss.reshape(()), part.weight)
        self.total = self.total + loss.detach()
        return loss

    def _backward(self, action: Action, last: bool) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        roots, grads = self._roots(action, flight)
        with self._at("backward", action):
            if roots:
                self.parallel.backward(roots, grads, last)
        self._send_back(action, flight)

    def _backward_of_inputs(self, action: Action) -> None:
        flight = self._flights[action.stage, action.microbatch]
        roots, grads = self._roots(action, flight)
        flight.halves = Halves(roots, grads, [x for x in flight.received if x.requires_grad])
        with self._at("backward of the inputs", action):
            flight.halves.inputs(self._accumulate)
        self._send_back(action, flight)
        flight.received, flight.outputs = [], []

    def _backward_of_weights(self, action: Action) -> None:
        halves = self._flights.pop((action.stage, action.microbatch)).halves
        if halves is not None:
            with self._at("backward of the weights", action), self.parallel.in_pieces():
                halves.weights()

    def _accumulate(self, roots: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
        self.parallel.backward(roots, grads, False)

    def _send_back(self, action: Action, flight: _Flight) -> None:
        """The gradients of what the stage received, zero where nothing reached."""
        message = message_of(action, self.plan.stage_count - 1)
        if message is not None:
            part = self.parts[action.microbatch]
            ports = part.bound[action.stage].program.receives
            back = [
                x.grad if x.grad is not None else torch.zeros_like(x)
                for port, x in zip(ports, flight.received, strict=True)
                if _carries_gradient(port)
            ]
            dtypes = [x.dtype for x in flight.received]
            with self._at("sending gradients", action):
                self._channels.send(message, back, part.specs_back(action.stage, ports, dtypes))

    def _roots(self, action: Action, flight: _Flight) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where backward starts, and with which gradients: the loss, or the sent values with what comes back."""
        if action.stage == self.plan.stage_count - 1 and self.merged is not None:
            return self._roots_of_merged(action, flight)
        if action.stage == self.plan.stage_count - 1:
            (loss,) = flight.outputs
            return ([loss], [self.precision.seed(loss)]) if loss.requires_grad else ([], [])
        with self._at("receiving gradients", action):
            grads = self._channels.take(Message("B", action.stage, action.microbatch))
        ports = self.parts[action.microbatch].bound[action.stage].program.sends
        sent = [x for port, x in zip(ports, flight.outputs, strict=True) if _carries_gradient(port)]
        pairs = [(x, grad) for x, grad in zip(sent, grads, strict=True) if x.requires_grad]
        return [x for x, _ in pairs], [grad for _, grad in pairs]

    def _roots_of_merged(self, action: Action, flight: _Flight) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs of a microbatch with their gradients of the loss of all of them, made at the first backward."""
        assert self.merged is not None
        if self._of_merged is None:
            made = [self.outputs[i] for i in range(len(self.parts))]
            with self._at("the loss", action), self.precision.autocast():
                loss, self._of_merged = self.merged.gradients(made, self.precision.seed)
                self.total = _one_number(loss).detach()
            self.outputs = {}
        grads = self._of_merged[action.microbatch]
        pairs = [(x, grad) for x, grad in zip(flight.outputs, grads, strict=True) if grad is not None]
        return [x for x, _ in pairs], [grad for _, grad in pairs]

    def _at(self, operation: str, action: Action | None) -> AbstractContextManager[None]:
        """Say where an error happens, and where this rank is while it lasts."""
        where = self.stage.place if action is None else f"stage {action.stage}, microbatch {action.microbatch}"
        return self.heartbeat.guard(operation, where)


def _carries_gradient(port: Port) -> bool:
    return port.value.requires_grad and (port.value.dtype.is_floating_point or port.value.dtype.is_complex)


def _check_sent(outputs: Sequence[Tensor], ports: Sequence[Port], specs: Sequence[Spec], domains: bool) -> None:
    """The next stage receives what its ports say; anything else would be read as other numbers, or wait for ever."""
    for port, spec, x in zip(ports, specs, outputs, strict=True):
        if tuple(x.shape) != spec.shape or x.dtype is not spec.dtype:
            raise LaunchError(
                f"%{spec.name} has shape {tuple(x.shape)} and {x.dtype}, the next stage expects {spec.shape} and "
                f"{spec.dtype}",
                fix="compile for this input: give the batch dims (in_dims, input_layout) of every input",
            )
        if x.requires_grad and not _carries_gradient(port):
            raise LaunchError(f"%{spec.name} carries a gradient, but the program has no message for it")
        if domains and spec.states is not None and not torch.equal(spec.decode(spec.encode(x)), x):
            low, count = spec.states
            raise LaunchError(
                f"%{spec.name} travels as bits because it holds whole numbers {low} to {low + count - 1} only, but it "
                f"holds others, up to {float(x.detach().abs().max()):.6g}",
                fix="report it with the model: the analysis of domains is wrong",
            )


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"loss_fn returned {_describe(loss)}, not one number",
            fix="reduce the loss to its mean over the samples",
        )
    return loss


def _is_zero(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) and weight == 0


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The loss times a weight, in the dtype of the loss."""
    return loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)


def _nothing(outputs: Sequence[Tensor]) -> Tensor:
    """Zero, from the outputs: a microbatch that weighs nothing (its own loss may be 0 / 0) still has its backward."""
    return torch.stack([(x * 0).sum() for x in outputs if x.is_floating_point()]).sum()


def _describe(thing: Any) -> str:
    return f"a tensor of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"
