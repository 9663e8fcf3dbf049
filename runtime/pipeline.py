"""The pipeline executor: carries out a rank's actions, forward and backward of microbatches, in the order given.

Torch's schedules give the order (`program.Action`); sending and receiving is done here, because a spiking network needs
what torch's stages refuse: microbatches of different sizes, several outputs, views, values without a gradient, and
values that only pass through a stage.

Every message's shape is known to both sides beforehand, from the port's shape at the example batch and the microbatch's
size. A value that carries no gradient has no message back. Messages arrive in the order of the receiver's actions; the
next one is always posted already (`Inbox`), and what was sent is kept until it has left (`Outbox`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.program import Action, Port
from snnpart.runtime.collectives import Axis
from snnpart.runtime.data_parallel import Alone
from snnpart.runtime.ranks import BACKWARD, FORWARD, Ranks
from snnpart.runtime.stage import BoundStage, Stage

Spec = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Part:
    """One microbatch: its size, its weight in the loss, the bound graph for its shapes, inputs and targets."""

    size: int
    weight: float
    bound: BoundStage
    inputs: Sequence[Tensor]
    targets: Any = None

    def weighing(self, weight: float) -> Part:
        """The same microbatch with another weight."""
        return replace(self, weight=weight)

    def specs(self, ports: Sequence[Port]) -> list[Spec]:
        """Name, shape and dtype of the ports' values for this microbatch."""
        return [(p.name, p.value.shape_at(self.size - self.bound.batch), p.value.dtype) for p in ports]


@dataclass
class _Flight:
    """What a microbatch leaves between its forward and its backward."""

    received: list[Tensor]
    outputs: list[Tensor]


class Outbox:
    """Sends to one neighbour; tensors are kept until they have left."""

    def __init__(self, axis: Axis, index: int) -> None:
        self._group, self._to = axis.group, axis.ranks[index]
        self._leaving: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        self._leaving = [(work, tensor) for work, tensor in self._leaving if not work.is_completed()]
        for tensor in tensors:
            if tensor.numel():
                wire = tensor.detach().contiguous()
                self._leaving.append((dist.isend(wire, self._to, group=self._group), wire))

    def wait(self) -> None:
        """Until everything has left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


class Inbox:
    """Receives messages from one neighbour in a known order; one more than is needed now is always posted."""

    def __init__(
        self, axis: Axis, index: int, messages: Sequence[tuple[int, Sequence[Spec]]], device: torch.device
    ) -> None:
        """`messages`: for every message to come its microbatch and the values it holds."""
        self._group, self._source, self._device = axis.group, axis.ranks[index], device
        self._coming = iter(messages)
        self._posted: list[tuple[int, list[tuple[Any, Tensor]]]] = []

    def take(self, microbatch: int) -> list[Tensor]:
        """The values of the next message, which must be this microbatch's."""
        while len(self._posted) < 2 and self._post():
            pass
        number, works = self._posted.pop(0)
        if number != microbatch:
            raise LaunchError(f"the schedule wants microbatch {microbatch}, microbatch {number} comes first")
        for work, _ in works:
            if work is not None:
                work.wait()
        return [tensor for _, tensor in works]

    def _post(self) -> bool:
        message = next(self._coming, None)
        if message is None:
            return False
        number, specs = message
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for _, shape, dtype in specs]
        works = [dist.irecv(t, self._source, group=self._group) if t.numel() else None for t in tensors]
        self._posted.append((number, list(zip(works, tensors, strict=True))))
        return True


@dataclass
class Pipeline:
    """This rank's side of the pipeline for one pass over its microbatches.

    `loss` turns (flat outputs, part) into the microbatch's loss on the last stage; None: forward only.
    """

    ranks: Ranks
    stage: Stage
    parallel: Alone
    parts: Sequence[Part]
    loss: Callable[[Sequence[Tensor], Part], Tensor] | None = None
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    total: float | Tensor = 0.0
    _flights: dict[int, _Flight] = field(default_factory=dict)

    def run(self, actions: Sequence[Action]) -> None:
        """Carry out the actions. On the last stage `outputs` (forward only) or `total` (the loss) is then set."""
        self._open(actions)
        left = sum(action.kind == "B" for action in actions)
        for action in actions:
            part = self.parts[action.microbatch]
            if action.kind == "F":
                self._forward(action.microbatch, part)
            else:
                left -= 1
                self._backward(action.microbatch, part, last=left == 0)
        for box in (self._to_next, self._to_previous):
            if box is not None:
                with self._at("sending", None):
                    box.wait()

    def _open(self, actions: Sequence[Action]) -> None:
        """The four message channels that this stage has."""
        forward, backward = self.ranks.axes[FORWARD], self.ranks.axes[BACKWARD]
        at, device = forward.index, self.stage.device
        comes = [(a.microbatch, self.parts[a.microbatch]) for a in actions if a.kind == "F"]
        returns = [(a.microbatch, self.parts[a.microbatch]) for a in actions if a.kind == "B"]
        first, last = at == 0, at == forward.size - 1
        arriving = [(i, part.specs(part.bound.program.receives)) for i, part in comes]
        returning = [(i, part.specs(_with_gradient(part.bound.program.sends))) for i, part in returns]
        self._from_previous = None if first else Inbox(forward, at - 1, arriving, device)
        self._from_next = None if last else Inbox(backward, at + 1, returning, device)
        self._to_next = None if last else Outbox(forward, at + 1)
        self._to_previous = None if first else Outbox(backward, at - 1)

    def _forward(self, number: int, part: Part) -> None:
        received = self._receive(number, part)
        with self._at("forward", number):
            outputs = list(self.stage.forward(part.bound, part.inputs, received, part.size))
        if self._to_next is not None:
            with self._at("sending activations", number):
                _check_sent(outputs, part)
                self._to_next.send(outputs)
        elif self.loss is None:
            self.outputs[number] = tuple(outputs)
        else:
            with self._at("the loss", number):
                outputs = [self._weighted_loss(outputs, part)]
        if self.loss is not None:
            self._flights[number] = _Flight(received, outputs)

    def _receive(self, number: int, part: Part) -> list[Tensor]:
        if self._from_previous is None:
            return []
        with self._at("receiving activations", number):
            received = self._from_previous.take(number)
        if self.loss is not None:
            for port, tensor in zip(part.bound.program.receives, received, strict=True):
                tensor.requires_grad_(_carries_gradient(port))
        return received

    def _weighted_loss(self, outputs: Sequence[Tensor], part: Part) -> Tensor:
        assert self.loss is not None
        loss = self.loss(outputs, part)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"loss_fn returned {_describe(loss)}, not one number",
                fix="reduce the loss to its mean over the samples",
            )
        loss = loss.reshape(()) * part.weight
        self.total = self.total + loss.detach()
        return loss

    def _backward(self, number: int, part: Part, last: bool) -> None:
        flight = self._flights.pop(number)
        roots, grads = self._roots(number, part, flight)
        with self._at("backward", number):
            if roots:
                self.parallel.backward(roots, grads, last)
        if self._to_previous is not None:
            ports = zip(part.bound.program.receives, flight.received, strict=True)
            back = [
                x.grad if x.grad is not None else torch.zeros_like(x) for port, x in ports if _carries_gradient(port)
            ]
            with self._at("sending gradients", number):
                self._to_previous.send(back)

    def _roots(self, number: int, part: Part, flight: _Flight) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where backward starts, and with which gradients: the loss, or the sent values with what comes back."""
        if self._from_next is None:
            return ([flight.outputs[0]], [None]) if flight.outputs[0].requires_grad else ([], [])
        with self._at("receiving gradients", number):
            grads = self._from_next.take(number)
        sent = [x for port, x in zip(part.bound.program.sends, flight.outputs, strict=True) if _carries_gradient(port)]
        pairs = [(x, grad) for x, grad in zip(sent, grads, strict=True) if x.requires_grad]
        return [x for x, _ in pairs], [grad for _, grad in pairs]

    @contextmanager
    def _at(self, operation: str, microbatch: int | None) -> Iterator[None]:
        """Say where an error happened: communication errors become LaunchErrors, others get a note."""
        try:
            yield
        except Exception as error:
            which = "" if microbatch is None else f", microbatch {microbatch}"
            where = f"{self.ranks.place}, stage {self.stage.index}{which}"
            if operation.startswith(("sending", "receiving")) and not isinstance(error, LaunchError):
                raise LaunchError(
                    f"{operation} failed: {error}", where=where, fix="see the first rank that failed"
                ) from error
            error.add_note(f"in {operation} of {where}")
            raise


def _carries_gradient(port: Port) -> bool:
    return port.value.requires_grad and (port.value.dtype.is_floating_point or port.value.dtype.is_complex)


def _with_gradient(ports: Sequence[Port]) -> list[Port]:
    return [port for port in ports if _carries_gradient(port)]


def _check_sent(outputs: Sequence[Tensor], part: Part) -> None:
    """The next stage receives what its ports say; anything else would be read as other numbers, or wait for ever."""
    ports = part.bound.program.sends
    for port, (name, shape, dtype), x in zip(ports, part.specs(ports), outputs, strict=True):
        if tuple(x.shape) != shape or x.dtype is not dtype:
            raise LaunchError(
                f"%{name} has shape {tuple(x.shape)} and {x.dtype}, the next stage expects {shape} and {dtype}",
                fix="compile for this input: give the batch dims (in_dims, input_layout) of every input",
            )
        if x.requires_grad and not _carries_gradient(port):
            raise LaunchError(f"%{name} carries a gradient, but the program has no message for it")


def _describe(thing: Any) -> str:
    return f"a tensor of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"
