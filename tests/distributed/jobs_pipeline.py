"""Pipelines with something wrong in them."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from snnpart.errors import LaunchError
from snnpart.runtime import heartbeat
from snnpart.runtime.launch import launch
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch
from tests.distributed.jobs_launch import error_of


def claim_spikes() -> None:
    """A real value whose port says that it is 0 or 1."""
    program = compile_by_hand(make_net(), pp=2)
    first, second = program.stage(0, 0), program.stage(1, 0)
    ports = (replace(first.sends[0], states=(0, 2)), *first.sends[1:])
    stages = {(0, 0): replace(first, sends=ports), (1, 0): replace(second, receives=ports)}
    launch(replace(program, stages=stages)).train_step(*batch(0, 4), F.cross_entropy)


def misbehaves(how: str) -> None:
    """In the second step the last stage's loss of microbatch 1 hangs, is killed or raises. Two seconds of patience."""
    running = launch(compile_by_hand(make_net(), pp=2, microbatches=3), timeout=timedelta(seconds=2))
    x, y = batch(0, 6)
    running.train_step(x, y, F.cross_entropy)
    calls = [0]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2 and how == "hangs":
            time.sleep(60)
        if calls[0] == 2 and how == "dies":
            time.sleep(0.5)
            os._exit(3)
        if calls[0] == 2:
            raise ValueError("no such loss")
        return F.cross_entropy(out, target)

    running.train_step(x, y, loss)


def sleeps_between_steps(file: str) -> None:
    """Rank 1 comes too late to the second step. Why a process is ended is written to `file`."""

    def end(reason: str) -> None:
        Path(f"{file}{dist.get_rank()}").write_text(reason)
        os._exit(1)

    heartbeat._end = end
    running = launch(compile_by_hand(make_net(), pp=2), timeout=timedelta(seconds=2))
    running.train_step(*batch(0, 4), F.cross_entropy)
    if dist.get_rank() == 1:
        time.sleep(10)
    running.train_step(*batch(0, 4), F.cross_entropy)


def breaks_and_goes_on() -> dict[str, Any]:
    """One process: a step that raised leaves no gradient and no state; the next one is as after launch."""
    running = launch(compile_by_hand(make_net(), microbatches=2))
    x, y = batch(0, 4)
    running.train_step(x, y, F.cross_entropy)
    wanted = running.gradients()
    running.zero_grad()
    calls = [0]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("no such loss")
        return F.cross_entropy(out, target)

    kind = ""
    try:
        running.train_step(x, y, loss)
    except ValueError as error:
        kind = type(error).__name__
    left = running.gradients()
    running.train_step(x, y, F.cross_entropy)
    result = {"kind": kind, "left": left, "wanted": wanted, "after": running.gradients()}
    running.close()
    return result


def broken_program() -> tuple[str, str]:
    """All ranks raise in their loss or receive; another step says that the program must be launched again."""
    running = launch(compile_by_hand(make_net(), pp=2), timeout=timedelta(seconds=2))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no such loss")

    x, y = batch(0, 4)
    with contextlib.suppress(ValueError, LaunchError):
        running.train_step(x, y, loss)
    found = error_of(lambda: running.train_step(x, y, F.cross_entropy))
    running.close()
    return found
