"""Pipelines with something wrong in them."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

from snnpart import compat
from snnpart.api import parallelize
from snnpart.errors import LaunchError
from snnpart.program import StageProgram
from snnpart.runtime import signatures
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import det, fill
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch
from tests.distributed.jobs_launch import Moody, error_of


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


def raises_alone(at: int) -> tuple[str, str, float]:
    """In the second step the loss raises on rank `at` only, while the others would wait for a minute: each rank's
    error, and the seconds to it."""
    running = launch(compile_by_hand(make_net(), pp=2, microbatches=3), timeout=timedelta(seconds=60))
    x, y = batch(0, 6)
    running.train_step(x, y, F.cross_entropy)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        if dist.get_rank() == at:
            raise ValueError("no such loss")
        return F.cross_entropy(out, target)

    start = time.monotonic()
    try:
        running.train_step(x, y, loss)
    except Exception as error:
        found = type(error).__name__, str(error), time.monotonic() - start
    running.close()
    return found


def raise_alike() -> dict[str, Any]:
    """The loss raises on every rank; each catches its own error, waits, closes and launches again."""
    program = compile_by_hand(make_net(), microbatches=2)
    running = launch(program, timeout=timedelta(seconds=20))
    x, y = batch(dist.get_rank(), 4)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no such loss")

    kind = ""
    try:
        running.train_step(x, y, loss)
    except ValueError as error:
        kind = type(error).__name__
    time.sleep(5.0)  # two beats and more
    state = running.state_dict()
    parameters = {name: state[name] for name, _ in running.named_parameters()}
    running.close()
    again = launch(program)
    found = {"kind": kind, "parameters": parameters, "loss": again.train_step(x, y, F.cross_entropy).item()}
    again.close()
    return found


def goes_on_after(how: str) -> dict[str, Any]:
    """Two dp ranks go on after an error that all of them have: of the user's weights of samples, or of a capture that
    fails on rank 1. Later rank 0 comes three seconds late, which are four beats, to a step. A broken program would
    raise there."""
    execution = "cuda_graph" if how == "capture" else "eager"
    broken = [False]

    def weigh(target: Tensor) -> float:
        if broken[0]:
            raise ValueError("no such label")
        return float(len(target))

    options: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "timeout": timedelta(seconds=7)}
    running = launch(compile_by_hand(make_net(), dp="ddp"), execution=execution, loss_reduction=weigh, **options)
    x, y = batch(dist.get_rank(), 4)
    losses = [running.train_step(x, y, F.cross_entropy).item()]
    broken[0] = True
    text = ""
    try:
        if how == "capture":
            _capture_in_vain(running, "no such loss")
        else:
            running.train_step(x, y, F.cross_entropy)
    except ValueError as error:
        text = str(error)
    broken[0] = False
    losses.append(running.train_step(x, y, F.cross_entropy).item())
    time.sleep(3.0 if dist.get_rank() == 0 else 0.0)
    losses.append(running.train_step(x, y, F.cross_entropy).item())
    found = {"text": text, "losses": losses, "notices": list(running.notices)}
    running.close()
    return found


def _capture_in_vain(running: RunningProgram, text: str) -> None:
    """A capture as a GPU would do it: on rank 1 the pass raises in its forward; rank 0's works and takes longer."""
    captures = running._execution.captures
    (step,) = captures._passes.values()
    stage = running.stage

    def raises(*_: Any) -> Any:
        raise ValueError(text)

    def fails(*_: Any) -> None:
        with mock.patch.object(stage, "forward", raises):
            step._body()

    def works(*_: Any) -> None:
        with running._engine.heartbeat.within("forward, stage 0, microbatch 0"):
            time.sleep(3.0)

    with mock.patch.object(step, "capture", works if dist.get_rank() == 0 else fails):
        with mock.patch.object(captures, "stream", "a stream"), mock.patch.object(compat, "end_failed_capture"):
            assert not captures.capture(step)


def fails_in_evaluation(where: str) -> dict[str, Any]:
    """Rank 1 raises in the forward of an evaluation of two stages, or in the loss of one on two dp ranks: each rank's
    error, the seconds to it, and what comes of the next evaluation."""
    running = launch(compile_by_hand(make_net(), pp=2 if where == "forward" else 1), timeout=timedelta(seconds=20))
    x, y = batch(0, 4)
    running.eval_step(x, y, F.cross_entropy)

    def raises(*_: Any) -> Any:
        raise ValueError("no such layer")

    mine = dist.get_rank() == 1
    stage = mock.patch.object(running.stage, "forward", raises) if mine and where == "forward" else nullcontext()
    found: dict[str, Any] = {}
    start = time.monotonic()
    try:
        with stage:
            running.eval_step(x, y, raises if mine and where == "loss" else F.cross_entropy)
    except Exception as error:
        found = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    try:
        found["next"] = running.eval_step(x, y, F.cross_entropy)[1].item()
    except LaunchError as error:
        found["next"] = str(error)
    running.close()
    return found


def sleeps_between_steps() -> str:
    """Rank 1 comes too late to the second step: each rank's error."""
    running = launch(compile_by_hand(make_net(), pp=2), timeout=timedelta(seconds=2))
    running.train_step(*batch(0, 4), F.cross_entropy)
    if dist.get_rank() == 1:
        time.sleep(10)
    try:
        running.train_step(*batch(0, 4), F.cross_entropy)
    except LaunchError as error:
        return str(error)
    finally:
        running.close()
    return ""


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


def connects(how: str) -> tuple[str, float]:
    """Launch and close at once, while rank 1 comes late to the store of heartbeats or does not reach it: the error's
    text, and the seconds that launch took."""
    real = dist.TCPStore

    def late(*arguments: Any, is_master: bool, **options: Any) -> dist.TCPStore:
        if not is_master and how == "late":
            time.sleep(1.0)
        elif not is_master:
            raise dist.DistNetworkError("no route to host")
        return real(*arguments, is_master=is_master, **options)

    start = time.monotonic()
    try:
        dist.TCPStore = late  # type: ignore[misc, assignment]
        running = launch(compile_by_hand(make_net(), pp=2), timeout=timedelta(seconds=20))
        seconds = time.monotonic() - start
        running.close()
        return "", seconds
    except LaunchError as error:
        return str(error), time.monotonic() - start
    finally:
        dist.TCPStore = real  # type: ignore[misc]


def leaves_late() -> dict[str, Any]:
    """Rank 1 closes half a second after rank 0: when it began to and when each was through, by one clock; whether the
    store was gone by then."""
    running = launch(compile_by_hand(make_net(), pp=2), timeout=timedelta(seconds=20))
    if dist.get_rank() == 1:
        time.sleep(0.5)
    closing, store = time.monotonic(), running._engine.heartbeat._store
    lost = False
    try:
        assert store is not None
        store.set("still", "there")
    except RuntimeError:
        lost = True
    running.close()
    return {"closing": closing, "closed": time.monotonic(), "lost": lost}


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


def many_shapes() -> dict[str, Any]:
    """Four numbers of steps and four batch sizes, train and eval, three times over, with two graphs kept: what is alive
    after each round."""
    signatures.KEPT = 2
    program = parallelize(fill(Moody()), pp=2, example_inputs=det(3, 4, 4), input_layout="TNF", verify="off")
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    alive = []
    for _ in range(3):
        for t in range(1, 5):
            size = 1 + t % 4
            running.train_step(det(t, size, 4), torch.arange(size) % 3, F.cross_entropy)
            running.eval_step(det(t, size, 4))
        gc.collect()
        alive.append(_alive())
    running.close()
    return {"alive": alive, "closed": _alive(), "compiled": len(running.notices)}


def _alive() -> dict[str, int]:
    """Process groups, tensors, graphs and stage programs that exist."""
    things = gc.get_objects()
    kinds = {"tensors": Tensor, "graphs": fx.Graph, "stages": StageProgram}
    groups = len(dist.distributed_c10d._world.pg_map)
    return {"groups": groups} | {name: sum(issubclass(type(x), kind) for x in things) for name, kind in kinds.items()}
