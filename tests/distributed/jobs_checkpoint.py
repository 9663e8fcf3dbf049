"""What the ranks do in the tests of checkpoints: train, save, load on another topology, go on."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from snnpart.api import parallelize
from snnpart.errors import CheckpointError
from snnpart.runtime.checkpoint import Checkpointer, folder
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import LIF, det, fill, reset
from tests.distributed.cases_tied import LanguageModel

SAMPLES = 12


class Odd(nn.Module):
    """7 channels, groups, a fused projection, and columns that come from a flattened map; an idle parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 7, 3, padding=1)
        self.b = nn.Conv2d(7, 14, 3, padding=1, groups=7)
        self.n, self.m = LIF(vth=0.2), LIF(vth=0.2)
        self.q = nn.Linear(14 * 4, 15)
        self.h = nn.Linear(5, 4)
        self.idle = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        x = self.m(self.b(self.n(self.a(x))))
        q, k, v = self.q(x.flatten(1)).chunk(3, -1)
        out: Tensor = self.h(q * k + v)
        return out


class Perceptron(nn.Module):
    """Case A17."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), LIF(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        out: Tensor = self.layers(x)
        return out


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same on every topology."""
    if name == "a17":
        return det(6, 4, k=0.7 + 0.1 * step), torch.tensor([0, 1, 2, 0, 1, 2])
    if name == "tied":
        return tuple((torch.arange(30) * 3 + i + step).reshape(6, 5) % 7 for i in range(2))  # type: ignore[return-value]
    return det(SAMPLES, 3, 2, 2, k=0.7 + 0.1 * step) * 2, torch.arange(SAMPLES) % 4


class Tied(LanguageModel):
    """One matrix at both ends, classes in dim 1: tokens [N, 5] -> [N, 7, 5]."""

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).transpose(1, 2)


NETS: dict[str, Callable[[], nn.Module]] = {"a17": Perceptron, "odd": Odd, "tied": Tied}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
}


@contextmanager
def launched(net: str, optimizer: str, tp: int, pp: int, dp: str, **options: Any) -> Iterator[RunningProgram]:
    model = fill(NETS[net](), scale=0.5 if net == "a17" else 0.9)
    dp_size = dist.get_world_size() // (tp * pp) if dist.is_initialized() else 1
    example = batch_of(net, 0)[0].chunk(dp_size)[0]
    microbatches = 1 if pp == 1 else 2
    program = parallelize(
        model, tp=tp, pp=pp, dp=dp, example_inputs=example, microbatches=microbatches, schedule="gpipe", reset=reset,
        **options,
    )  # fmt: skip
    running: Any = program.launch(OPTIMIZERS[optimizer])
    with running:
        yield running


def steps(running: RunningProgram, net: str, numbers: range) -> list[float]:
    at, dp = running.ranks.at.dp, running.ranks.mesh.dp
    losses = []
    for step in numbers:
        x, y = (part.chunk(dp)[at] for part in batch_of(net, step))
        losses.append(running.train_step(x, y, F.cross_entropy).item())
    return losses


def save_and_go_on(
    directory: str, net: str, optimizer: str = "adam", tp: int = 1, pp: int = 1, dp: str = "ddp", **options: Any
) -> tuple[list[float], list[float]]:
    """Three steps, a checkpoint that is written while the next three run; the losses of both."""
    with launched(net, optimizer, tp, pp, dp, **options) as running:
        average = {name: parameter.detach().clone() * 2 for name, parameter in running.named_parameters()}
        average = {name: getattr(value, "to_local", lambda value=value: value)() for name, value in average.items()}
        checkpointer = Checkpointer(Path(directory), running, mirrors={"ema": average})
        first = steps(running, net, range(3))
        checkpointer.save(3, {"epoch": 1, "rates": (0.1, {30: 2})})
        second = steps(running, net, range(3, 6))
        checkpointer.wait()
        return first, second


def load_and_go_on(
    directory: str, net: str, optimizer: str = "adam", tp: int = 1, pp: int = 1, dp: str = "ddp", **options: Any
) -> tuple[Any, list[float], dict[str, Tensor]]:
    """The three steps after a checkpoint, on this topology; its extra state, and the weights it held."""
    with launched(net, optimizer, tp, pp, dp, **options) as running:
        checkpointer = Checkpointer(Path(directory), running)
        path = checkpointer.latest()
        assert path is not None
        extra = checkpointer.load(path)
        weights = running.state_dict()
        return extra, steps(running, net, range(3, 6)), weights


def refused(directory: str, path: str, net: str = "odd") -> str:
    """What loading says; the program is as it was."""
    with launched(net, "adam", 2, 1, "ddp") as running:
        before = running.state_dict()
        checkpointer = Checkpointer(Path(directory), running)
        try:
            checkpointer.load(Path(path))
        except CheckpointError as error:
            after = running.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before), "something was changed"
            return str(error)
    return ""


def full_disk(directory: str, monkey_rank: int) -> list[str]:
    """The disk of one rank is full while it writes; then there is room again."""
    real = FileSystemWriter.write_data

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with launched("odd", "adam", 2, 1, "ddp") as running:
        checkpointer = Checkpointer(Path(directory), running)
        steps(running, "odd", range(1))
        checkpointer.save(1, {})
        checkpointer.wait()
        if running.ranks.rank == monkey_rank:
            FileSystemWriter.write_data = fails  # type: ignore[method-assign]
        checkpointer.save(2, {})
        try:
            checkpointer.wait()
            message = ""
        except CheckpointError as error:
            message = str(error)
        finally:
            FileSystemWriter.write_data = real  # type: ignore[method-assign]
        checkpointer.save(3, {})
        checkpointer.wait()
        return [message, *(path.name for path in folder.found(Path(directory)))]


def killed_while_writing(directory: str, delay: float, rank: int) -> None:
    """Save again and again; one rank is killed after the delay."""
    with launched("odd", "adam", 2, 1, "ddp") as running:
        checkpointer = Checkpointer(Path(directory), running)
        checkpointer.save(1, {"saved": 1})
        checkpointer.wait()
        if running.ranks.rank == 0:
            Path(directory, "reported").write_text("1")
        started = time.monotonic()
        for step in range(2, 1000):
            checkpointer.save(step, {"saved": step})
            if running.ranks.rank == rank and time.monotonic() - started > delay:
                time.sleep(delay % 0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.wait()
            if running.ranks.rank == 0:
                Path(directory, "reported.new").write_text(str(step))
                os.replace(Path(directory, "reported.new"), Path(directory, "reported"))


def two_writers_of_one_number(directory: str) -> str:
    """A mirror that claims to be cut as another parameter: its chunks do not tile."""
    with launched("odd", "adam", 2, 1, "ddp") as running:
        short = {name: p.detach()[..., :1] for name, p in running.named_parameters() if name == "a.weight"}
        checkpointer = Checkpointer(Path(directory), running, mirrors={"ema": short})
        try:
            checkpointer.save(1, {})
        except CheckpointError as error:
            return str(error)
    return ""


def small_disk(directory: str) -> list[str]:
    """Save until the disk of the directory is full; the message, and what is there."""
    with launched("odd", "adam", 2, 1, "ddp") as running:
        checkpointer = Checkpointer(Path(directory), running, keep_last=1000)
        message, step = "", 0
        while not message and step < 200:
            step += 1
            checkpointer.save(step, {})
            try:
                checkpointer.wait()
            except CheckpointError as error:
                message = str(error)
        return [message, str(step - 1)]
