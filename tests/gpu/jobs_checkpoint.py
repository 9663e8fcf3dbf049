"""Trains with captured steps, writes a checkpoint in the middle, and goes on: in the same program and from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from snnpart.runtime.checkpoint import Checkpointer
from snnpart.runtime.running import RunningProgram
from tests.gpu.jobs_execution import batch, dtype_of, launched, loss_fn, rate

STEPS, SAVED = 14, 8
"""Steps of the whole run, and before the checkpoint: both parts have captured ones, and an uneven batch."""


def steps(running: RunningProgram, numbers: range, dtype: torch.dtype) -> list[float]:
    losses = []
    for number in numbers:
        for group in running.optimizer.param_groups if running.optimizer else ():
            group["lr"] = rate(number)
        dp, at = running.ranks.mesh.dp, running.ranks.at.dp
        x, y = (part.tensor_split(dp)[at] for part in batch(number, dtype))
        losses.append(running.train_step(x, y, loss_fn))
    return [float(loss) for loss in losses]


def _ended(running: RunningProgram, losses: list[float]) -> dict[str, Any]:
    passes = running._execution.captures._passes.values()
    return {"losses": losses, "state": running.state_dict(), "captured": sum(one.is_captured for one in passes)}


def uninterrupted(name: str, mode: str, precision: str) -> dict[str, Any]:
    """The whole run."""
    with launched(name, mode, precision) as running:
        return _ended(running, steps(running, range(STEPS), dtype_of(precision)))


def with_checkpoint(name: str, mode: str, precision: str, directory: Path) -> dict[str, dict[str, Any]]:
    """A run that saves and goes on while the file is written, and one in a new program that goes on from the file."""
    dtype = dtype_of(precision)
    with launched(name, mode, precision) as running:
        checkpointer = Checkpointer(directory, running)
        first = steps(running, range(SAVED), dtype)
        path = checkpointer.save(SAVED, {})
        saved = _ended(running, first + steps(running, range(SAVED, STEPS), dtype))
        checkpointer.wait()
    with launched(name, mode, precision) as running:
        for number in range(5):  # captured before it is loaded into
            running.train_step(
                *(part.tensor_split(running.ranks.mesh.dp)[0] for part in batch(50 + number, dtype)), loss_fn
            )
        running.settle()
        Checkpointer(directory, running).load(path)
        resumed = _ended(running, first + steps(running, range(SAVED, STEPS), dtype))
    return {"saved": saved, "resumed": resumed}
