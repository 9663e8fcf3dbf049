"""What the ranks do in the tests about time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from snnpart.api import parallelize
from snnpart.runtime.batches import Batches
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import det
from tests.distributed.cases_time import Casts, counts, events, frame, normed, stateless, windows
from tests.distributed.jobs import dp_share
from tests.distributed.jobs_launch import error_of

KINDS = {"uint8": torch.uint8, "int16": torch.int16, "bool": torch.bool}


def started(program: Any, **options: Any) -> RunningProgram:
    running = program.launch(**options)
    assert isinstance(running, RunningProgram)
    return running


def norm_in_a_window() -> dict[str, Any]:
    """A08 on two data-parallel ranks: what is broadcast, gradients and averages after one window of three steps."""
    x, w = det(3, 6, 4), det(6, 4, k=0.2)
    running = started(parallelize(normed(), example_inputs=x, input_layout="TNF", time_steps=3, verify="off"))
    loss = lambda out, weights: (out.sum(0) * weights).sum() * (6 / out.shape[1])
    sent: list[int] = []
    original = dist.broadcast

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    mine_x, mine_w = dp_share(x, 1, running.ranks), dp_share(w, 0, running.ranks)
    with mock.patch.object(dist, "broadcast", counted):
        running.train_step(mine_x, mine_w, loss)
    own = {name: buffer.clone() for name, buffer in running.named_buffers()}
    result = {"sent": sent, "own": own, "gradients": running.gradients(), "state": running.state_dict()}
    running.close()
    return result


def integers(kind: str, **topology: Any) -> Tensor:
    """A27: the output for integer frames, put together over the data-parallel ranks."""
    x = counts(KINDS[kind], 4, 2, 4, 4)
    running = started(parallelize(Casts(stateless()), example_inputs=x, **topology))
    out: Tensor = running.eval_step(dp_share(x, 0, running.ranks))
    parts = running.ranks.gather(out, running.ranks.axes["dp"])
    running.close()
    return torch.cat(parts)


def train_events(
    kind: str, lengths: list[int], single_step: bool = False, again: bool = False, **topology: Any
) -> dict[str, Any]:
    """Train steps on windows of these lengths; with `single_step` the loop over time is snnpart's."""
    batches = windows(lengths, 6, KINDS[kind])
    options: dict[str, Any] = {"example_inputs": batches[0][0], "input_layout": "NTCHW", "verify": "off", **topology}
    if single_step:
        options["time_steps"] = lengths[0]
    program = parallelize(frame() if single_step else events(), **options)
    running = started(program, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loss = mean_loss if single_step else F.cross_entropy
    losses = [
        running.train_step(dp_share(x, 0, running.ranks), dp_share(y, 0, running.ranks), loss).item()
        for x, y in batches
    ]
    result = {"losses": losses, "state": running.state_dict(), "notices": list(running.notices)}
    running.close()
    return result


def mean_loss(out: Tensor, y: Tensor) -> Tensor:
    """[T, N, C]: the rate over time is the answer."""
    return F.cross_entropy(out.mean(0), y)


def without_cast(**topology: Any) -> dict[str, Any]:
    """The user's own error: when compiling, and when one rank's batch has the wrong dtype; then a step still works."""
    ints = counts(torch.int16, 4, 3, 2, 4, 4)
    floats, y = ints.double(), torch.arange(4) % 3
    compiling = error_of(lambda: parallelize(events(cast=False), example_inputs=ints, input_layout="NTCHW", **topology))
    program = parallelize(events(cast=False), example_inputs=floats, input_layout="NTCHW", verify="off", **topology)
    running = started(program)
    last = dist.get_rank() == dist.get_world_size() - 1
    stepping = error_of(lambda: running.train_step(ints if last else floats, y, F.cross_entropy))
    loss = running.train_step(floats, y, F.cross_entropy).item()
    running.close()
    return {"compiling": compiling, "stepping": stepping, "loss": loss}


def fails_for_itself() -> tuple[str, str, float]:
    """An error that is not snnpart's, on one rank only: all ranks raise it, none waits."""
    program = parallelize(events(), example_inputs=counts(torch.uint8, 4, 3, 2, 4, 4), input_layout="NTCHW", pp=2)
    running = started(program)
    batch = windows([3], 4)[0]
    found = ("", "")
    broken = mock.patch.object(Batches, "parts", side_effect=Unsendable("bad luck"))
    try:
        with broken if dist.get_rank() == 1 else mock.MagicMock():
            running.train_step(*batch, F.cross_entropy)
    except Exception as error:
        found = (type(error).__name__, str(error))
    loss = running.train_step(*batch, F.cross_entropy).item()
    running.close()
    return (*found, loss)


class Unsendable(Exception):
    """An error that cannot be sent to other ranks."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.callback = lambda: None
