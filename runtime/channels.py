"""Messages between the stages of a pipeline: what crosses, in which order it comes, and how it travels.

A message is one microbatch's values into a stage (F) or gradients back into one (B). Every message's shape is known to
both sides beforehand. Messages from one rank to another arrive in the order in which the sender's actions make them,
which the receiver reads off the sender's schedule; one that comes before it is wanted is kept. One more than is wanted
now is always posted. What was sent is kept until it has left. Two stages of one rank hand their values over directly.

There is one channel for each pair of ranks and direction (up the ranks, down the ranks), so that with NCCL a receive
that waits never stands before a send.

With `through_host` they travel over the CPU (`first_passes` says when and why), on the same way in the same order. So
they always do where NCCL is not between the ranks of GPUs: gloo takes no messages from a GPU's memory.

Under autocast the dtype of a value is known when it is computed only. The first message of a kind is then preceded by
the dtypes of its values, and nothing is posted ahead of it; both sides keep them (`WireTypes`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from snnpart.bits import States, width
from snnpart.plan import Plan
from snnpart.program import Action, Port, StageProgram
from snnpart.runtime import waits
from snnpart.runtime.collectives import Axis, over_nccl
from snnpart.runtime.kernels.bits import pack, unpack
from snnpart.runtime.ranks import BACKWARD, FORWARD, Ranks, control_device


@dataclass(frozen=True, slots=True)
class Spec:
    """A value of a message: its name, shape and dtype, and its states if it travels as bits (see `snnpart.bits`)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    states: States | None = None

    def empty(self, device: torch.device) -> Tensor:
        """Where what travels is received."""
        if self.states is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        planes = width(self.states[1]), -(-math.prod(self.shape) // 8)
        return torch.empty(planes, dtype=torch.uint8, device=device)

    def encode(self, x: Tensor) -> Tensor:
        """What travels for x."""
        return x if self.states is None else pack(x.detach(), self.states)

    def decode(self, wire: Tensor) -> Tensor:
        """x from what travelled."""
        if self.states is None:
            return wire
        return unpack(wire, math.prod(self.shape), self.states, self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """Values (F) or gradients (B) of a microbatch on their way into `stage`."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int


def message_of(action: Action, last: int) -> Message | None:
    """What an action sends, if anything."""
    if action.kind == "F":
        return Message("F", action.stage + 1, action.microbatch) if action.stage < last else None
    if action.kind in ("B", "I") and action.stage > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
"""Their places are what a header says."""

Way = Literal["sends", "receives"]


class WireTypes:
    """The dtypes of what crosses a stage's borders, for training and for evaluation: the ports', or what was seen."""

    def __init__(self, seen: bool) -> None:
        """`seen`: not the ports', but those of the values themselves, which autocast chooses."""
        self._seen = seen
        self._known: dict[tuple[int, Way, bool], tuple[ReferenceType[StageProgram], tuple[torch.dtype, ...]]] = {}

    def of(self, program: StageProgram, way: Way) -> tuple[torch.dtype, ...] | None:
        """None: not seen yet."""
        if not self._seen:
            ports: Sequence[Port] = getattr(program, way)
            return tuple(port.value.dtype for port in ports)
        known = self._known.get((id(program), way, torch.is_grad_enabled()))
        return None if known is None else known[1]

    def learn(self, program: StageProgram, way: Way, dtypes: Sequence[torch.dtype]) -> None:
        """From now on these."""
        key = (id(program), way, torch.is_grad_enabled())
        forget = lambda _: self._known.pop(key, None)  # noqa: E731
        self._known[key] = (ref(program, forget), tuple(dtypes))  # a graph of another shape may be dropped


def _as_header(dtypes: Sequence[torch.dtype], axis: Axis, device: torch.device) -> Tensor:
    assert axis.group is not None
    return torch.tensor([_DTYPES.index(x) for x in dtypes], device=control_device(axis.group, device))


def receive_header(axis: Axis, source: int, count: int, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes of the values of the message that comes next; waits for them."""
    assert axis.group is not None
    header = torch.zeros(count, dtype=torch.int64, device=control_device(axis.group, device))
    dist.recv(header, source, group=axis.group)
    return tuple(_DTYPES[code] for code in header.tolist())


class Outbox:
    """Sends to one rank; tensors are kept until they have left."""

    def __init__(self, axis: Axis, index: int, over: torch.device) -> None:
        """`over`: the device from which values leave."""
        self._axis, self._group, self._to, self._over = axis, axis.group, axis.ranks[index], over
        self._leaving: list[tuple[Any, Tensor]] = []

    def announce(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """Say the dtypes of the values of the next message."""
        header = _as_header(dtypes, self._axis, device)
        self._leaving.append((dist.isend(header, self._to, group=self._group), header))

    def send(self, tensors: Sequence[Tensor]) -> None:
        if not _capturing():  # which forbids to ask whether something has left
            self._leaving = [(work, tensor) for work, tensor in self._leaving if not work.is_completed()]
        for tensor in tensors:
            if tensor.numel():
                wire = tensor.detach().contiguous().to(self._over)
                self._leaving.append((dist.isend(wire, self._to, group=self._group), wire))

    def wait(self) -> None:
        """Until everything has left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


class Inbox:
    """Receives from one rank in a known order."""

    def __init__(
        self,
        axis: Axis,
        index: int,
        messages: Sequence[Message],
        contents: Contents,
        device: torch.device,
        over: torch.device,
    ) -> None:
        """`messages`: every message to come; `contents` says what it holds; values arrive `over` a device."""
        self._axis, self._group, self._source = axis, axis.group, axis.ranks[index]
        self._device, self._over = device, over
        self._coming, self._contents = deque(messages), contents
        self._posted: list[tuple[Message, list[tuple[Any, Tensor, Spec]]]] = []
        self._early: dict[Message, list[Tensor]] = {}

    def take(self, message: Message) -> list[Tensor]:
        """The values of a message, once they are here."""
        while message not in self._early:
            while len(self._posted) < 2 and self._post(ahead=bool(self._posted)):
                pass
            found, works = self._posted.pop(0)
            with waits.waiting():
                for work, _, _ in works:
                    if work is not None:
                        work.wait()
            self._early[found] = [spec.decode(wire.to(self._device)) for _, wire, spec in works]
        return self._early.pop(message)

    def _post(self, ahead: bool) -> bool:
        if not self._coming or (ahead and self._contents.announced(self._coming[0])):
            return False
        message = self._coming.popleft()
        if self._contents.announced(message):
            count = self._contents.count(message)
            self._contents.learn(message, receive_header(self._axis, self._source, count, self._device))
        specs = self._contents.specs(message)
        wires = [spec.empty(self._over) for spec in specs]
        works = [dist.irecv(wire, self._source, group=self._group) if wire.numel() else None for wire in wires]
        self._posted.append((message, list(zip(works, wires, specs, strict=True))))
        return True


class Contents(Protocol):
    """What messages into this rank hold."""

    def specs(self, message: Message) -> Sequence[Spec]: ...
    def announced(self, message: Message) -> bool:
        """Whether the dtypes of its values come before it."""

    def count(self, message: Message) -> int:
        """How many values it holds."""

    def learn(self, message: Message, dtypes: Sequence[torch.dtype]) -> None: ...


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Channels:
    """All channels of one rank for one pass over its microbatches."""

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        schedule: Mapping[int, Sequence[Action]],
        contents: Contents,
        *,
        through_host: bool = False,
    ) -> None:
        """`schedule`: the actions of every pipeline rank; `contents` says what a message into this rank holds."""
        self._plan, self._ranks, self._at = plan, ranks, ranks.axes["pp"].index
        self._through_host = through_host
        self._here: dict[Message, list[Tensor]] = {}
        self._out: dict[int, Outbox] = {}
        self._in: dict[int, Inbox] = {}
        for rank, actions in schedule.items():
            coming = [message for message in self._sent(actions) if plan.rank_of(message.stage) == self._at]
            if rank != self._at and coming:
                axis = self._axis(rank, self._at)
                self._in[rank] = Inbox(axis, rank, coming, contents, ranks.device, self._over(axis))

    def _sent(self, actions: Sequence[Action]) -> Iterator[Message]:
        messages = (message_of(action, self._plan.stage_count - 1) for action in actions)
        return (message for message in messages if message is not None)

    def _over(self, axis: Axis) -> torch.device:
        """The device between which values travel."""
        device = self._ranks.device
        if axis.group is None or (over_nccl(axis, device) and not self._through_host):
            return device
        return control_device(axis.group, device)

    def _axis(self, source: int, target: int) -> Axis:
        return self._ranks.axes[FORWARD if source < target else BACKWARD]

    def send(
        self, message: Message, tensors: Sequence[Tensor], specs: Sequence[Spec], *, announce: bool = False
    ) -> None:
        """Send without waiting; `specs` are the receiver's, who is told their dtypes first with `announce`."""
        target = self._plan.rank_of(message.stage)
        if target == self._at:
            self._here[message] = [x.detach() for x in tensors]
        else:
            if target not in self._out:
                axis = self._axis(self._at, target)
                self._out[target] = Outbox(axis, target, self._over(axis))
            if announce:
                self._out[target].announce([spec.dtype for spec in specs], self._ranks.device)
            self._out[target].send([spec.encode(x) for spec, x in zip(specs, tensors, strict=True)])

    def take(self, message: Message) -> list[Tensor]:
        """The values of a message into this rank."""
        if message in self._here:
            return self._here.pop(message)
        source = message.stage - 1 if message.kind == "F" else message.stage + 1
        return self._in[self._plan.rank_of(source)].take(message)

    def wait(self) -> None:
        """Until everything has left."""
        for box in self._out.values():
            box.wait()
