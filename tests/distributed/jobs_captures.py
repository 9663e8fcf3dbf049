"""What the ranks do in the tests of captures: steps that are replayed, captures that fail, checkpoints between them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.runtime.gradients import local_part
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch, dp_share
from tests.distributed.jobs_execution import OPTIMIZERS, step
from tests.distributed.recorded import recording
from tests.gpu import jobs_execution as gpu
from tests.gpu.jobs_checkpoint import uninterrupted, with_checkpoint

STEPS = 9


def captured(
    execution: str, optimizer: str = "sgd", fails: int | None = None, cycles: bool = False, **how: Any
) -> dict[str, Any]:
    """Steps and evaluations; captured after the third ones, but for rank `fails` (-1: no rank; None: nobody tries)."""
    block: AbstractContextManager[None] = nullcontext() if fails is None else recording(fails)
    running = launch(
        compile_by_hand(make_net(), **how), optimizer=OPTIMIZERS[optimizer], execution=execution, clip_grad_norm=0.5
    )
    with block:
        losses = []
        for number in range(STEPS):
            for group in running.optimizer.param_groups if running.optimizer and cycles else ():
                group["momentum"] = 0.8 + number / 50
            losses.append(step(running, number, 8))
        evaluated = [running.eval_step(batch(number, 6)[0]) for number in range(5)]
        loss = running.eval_step(*batch(99, 6), F.cross_entropy)[1].item()
        graphs = [one._graph for one in running._execution.captures._passes.values()]
    result = {"losses": [*losses, loss], "outputs": evaluated[-1], "state": running.state_dict()}
    result |= {"gradients": running.gradients(), "norm": float(running.grad_norm or 0.0)}
    result |= {"replays": [getattr(graph, "replays", 0) for graph in graphs], "notices": list(running.notices)}
    running.close()
    return result


def checkpointed(name: str, directory: str) -> dict[str, Any]:
    """Losses and states of an eager run without a break, of one that saves in the middle of captured steps, and of one
    that goes on from there."""
    found = {"eager": uninterrupted(name, "eager", "fp64")}
    with recording():
        return found | with_checkpoint(name, "cuda_graph", "fp64", Path(directory))


def overflow_of_one(execution: str, optimizer: str, **topology: Any) -> dict[str, Any]:
    """fp16: three steps, of which the second has Inf in one gradient of rank 1 alone."""
    running = parallelize(
        gpu.make_net(), example_inputs=gpu.batch(0)[0], input_layout="NCHW", time_steps=2, verify="off", **topology
    ).launch(OPTIMIZERS[optimizer], precision="fp16", execution=execution)
    assert isinstance(running, RunningProgram) and running.loss_scale is not None and running.optimizer is not None
    running.loss_scale.factor.fill_(2.0**10)
    x, y = (dp_share(part[:4], 0, running.ranks) for part in gpu.batch(0))
    running.train_step(x, y, gpu.loss_fn)
    before = all_of(running)
    spoil = [p.register_post_accumulate_grad_hook(_spoilt) for p in _largest(running) if running.ranks.rank == 1]
    running.train_step(x, y, gpu.loss_fn)
    finite = all(bool(local_part(p.grad).isfinite().all()) for p in running.parameters() if p.grad is not None)
    result = {"finite": finite, "unchanged": same(all_of(running), before), "scale": float(running.loss_scale.factor)}
    for handle in spoil:
        handle.remove()
    running.train_step(x, y, gpu.loss_fn)
    result["changed"] = not same(all_of(running), before)
    running.close()
    return result


def all_of(running: RunningProgram) -> list[Tensor]:
    """Copies of this rank's parameters and of the state of its optimizer."""
    assert running.optimizer is not None
    state = [x for inner in running.optimizer.state.values() for x in inner.values() if isinstance(x, Tensor)]
    return [local_part(x.detach()).clone() for x in (*running.parameters(), *state)]


def same(these: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(these, others, strict=True))


def _largest(running: RunningProgram) -> list[nn.Parameter]:
    """The parameter of which this rank has the most numbers: one that is cut, where any is."""
    return [max(running.parameters(), key=lambda p: local_part(p).numel())]


def _spoilt(parameter: Tensor) -> None:
    assert parameter.grad is not None
    local_part(parameter.grad).view(-1)[0] = float("inf")
