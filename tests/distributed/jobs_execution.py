"""What the ranks do in the tests of execution modes and precisions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from snnpart.api import parallelize
from snnpart.errors import SnnpartError
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch, dp_share
from tests.gpu import jobs_execution as gpu

SIZES = (8, 8, 7, 8, 8, 6, 8, 8)
"""Samples of a dp rank in each step: two uneven ones among equal ones."""

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-5),
}


def step(running: RunningProgram, number: int, size: int) -> float:
    """One step on this dp rank's samples, with the learning rate of a schedule."""
    dp, at = running.ranks.mesh.dp, running.ranks.at.dp
    x, y = batch(number, size * dp)
    for group in running.optimizer.param_groups if running.optimizer else ():
        group["lr"] = group["lr"] * 0.9
    return running.train_step(x[at * size :][:size], y[at * size :][:size], F.cross_entropy).item()


def train(
    execution: str, optimizer: str = "sgd", clip: float | None = None, precision: str = "fp32", **how: Any
) -> Any:
    """Steps with a changing learning rate, uneven batches, and a launch that takes over in the middle."""
    before = gpu.compiled_graphs()
    options = {"optimizer": OPTIMIZERS[optimizer], "clip_grad_norm": clip, "precision": precision}
    running = launch(compile_by_hand(make_net(), **how), execution=execution, **options)
    losses = [step(running, i, size) for i, size in enumerate(SIZES[:4])]
    state, norm = running.state_dict(), running.grad_norm
    inner = None if running.optimizer is None else running.optimizer.state_dict()
    running.close()
    running = launch(compile_by_hand(make_net(seed=1), **how), execution=execution, **options)
    running.load_state_dict(state)
    if running.optimizer is not None:
        running.optimizer.load_state_dict(inner)
    losses += [step(running, 4 + i, size) for i, size in enumerate(SIZES[4:])]
    outputs = running.eval_step(batch(99, 5)[0])
    result = {"losses": losses, "state": running.state_dict(), "outputs": outputs, "norm": float(norm or 0.0)}
    result |= {"notices": list(running.notices), "compiled": gpu.compiled_graphs() - before}
    running.close()
    return result


def train_case(name: str, execution: str, steps: int = 3, **topology: Any) -> dict[str, Any]:
    """A network of the cases under an execution mode."""
    case = CASES[name]
    running = launch(
        compile_case(case, **topology),
        optimizer=OPTIMIZERS["sgd"],
        target_dim=case.target_dim,
        execution=execution,
    )
    losses = []
    for x, y in case.batches() * steps:
        mine = dp_share(x, case.batch_dim, running.ranks), dp_share(y, case.target_dim, running.ranks)
        losses.append(running.train_step(*mine, case.loss_fn(x.shape[case.batch_dim])).item())
    result = {"losses": losses, "state": running.state_dict(), "gradients": running.gradients()}
    running.close()
    return result


def poisoned(where: str, optimizer: str = "adamw", **how: Any) -> dict[str, Any]:
    """A static step on NaN inputs of the last rank, or with gradients of it that are not finite: nothing changes (of
    inputs no buffer either), and all ranks say why."""
    options = {"optimizer": OPTIMIZERS[optimizer], "clip_grad_norm": 1.0, "execution": "cuda_graph"}
    running = launch(compile_by_hand(make_net(), **how), **options)
    step(running, 0, 4)
    held = dict(running.named_parameters()) | (dict(running.named_buffers()) if where == "inputs" else {})
    before = {name: value.detach().clone() for name, value in held.items()}
    x, y = batch(1, 4)
    loss = F.cross_entropy
    if where == "inputs" and running.ranks.rank == 1:
        x = x.clone()
        x[0, 0] = float("nan")
    if where == "gradients" and running.ranks.rank == 1:
        loss = lambda out, target: F.cross_entropy(out, target) * 1e308 * 1e10
    text = ""
    try:
        running.train_step(x, y, loss)
    except SnnpartError as error:
        text = f"{type(error).__name__}: {error}"
    unchanged = all(torch.equal(before[name], value) for name, value in held.items())
    after = step(running, 2, 4)
    running.close()
    return {"text": text, "unchanged": unchanged, "after": after}


def ignored(execution: str, **how: Any) -> list[float]:
    """Targets of which some do not count, and a microbatch in which none does."""
    weigh = lambda y: (y != -100).sum()
    running = launch(
        compile_by_hand(make_net(), **how), optimizer=OPTIMIZERS["sgd"], loss_reduction=weigh, execution=execution
    )
    losses = []
    for number in range(4):
        x, y = batch(number, 6)
        y[: number + running.ranks.at.dp] = -100
        if number == 3:
            y[3:] = -100
        loss = lambda out, target: F.cross_entropy(out, target, ignore_index=-100)
        losses.append(running.train_step(x, y, loss).item())
    running.close()
    return losses


def autocast(precision: str, execution: str, **topology: Any) -> dict[str, Any]:
    """Steps of a convolutional network in float32 under autocast."""
    running = parallelize(
        gpu.make_net(), example_inputs=gpu.batch(0)[0], input_layout="NCHW", time_steps=2, verify="off", **topology
    ).launch(OPTIMIZERS["sgd"], precision=precision, execution=execution)
    assert isinstance(running, RunningProgram)
    losses = []
    for number in range(2):
        mine = [dp_share(part[:6], 0, running.ranks) for part in gpu.batch(number)]
        losses.append(running.train_step(*mine, gpu.loss_fn).item())
    outputs = running.eval_step(gpu.batch(2)[0][:6])
    result = {"losses": losses, "state": running.state_dict(), "dtype": outputs.dtype}
    result["scale"] = None if running.loss_scale is None else running.loss_scale.state_dict()
    running.close()
    return result


def overflow(**topology: Any) -> dict[str, Any]:
    """fp16: a step whose gradients overflow on one rank changes nothing anywhere, and halves the scale everywhere."""
    running = parallelize(
        gpu.make_net(), example_inputs=gpu.batch(0)[0], input_layout="NCHW", time_steps=2, verify="off", **topology
    ).launch(OPTIMIZERS["adamw"], precision="fp16", execution="cuda_graph")
    assert isinstance(running, RunningProgram) and running.loss_scale is not None
    before = {name: value.detach().clone() for name, value in running.named_parameters()}
    running.loss_scale.factor.fill_(2.0**60)
    x, y = (dp_share(part[:4], 0, running.ranks) for part in gpu.batch(0))
    running.train_step(x, y, gpu.loss_fn)
    unchanged = all(torch.equal(before[name], value) for name, value in running.named_parameters())
    scale = running.loss_scale.state_dict()["factor"]
    running.loss_scale.factor.fill_(2.0**10)
    running.train_step(x, y, gpu.loss_fn)
    changed = any(not torch.equal(before[name], value) for name, value in running.named_parameters())
    running.close()
    return {"unchanged": unchanged, "scale": scale, "changed": changed}


def lying_otherwise(execution: str, **options: Any) -> dict[str, Any]:
    """Weights with channels last, as kernels want them, under dp."""
    running = parallelize(
        gpu.make_net().double(), example_inputs=gpu.batch(0)[0].double(), input_layout="NCHW", time_steps=2,
        verify="off", channels_last=True, **options,
    ).launch(OPTIMIZERS["adamw"], execution=execution)  # fmt: skip
    assert isinstance(running, RunningProgram)
    losses = []
    for number in range(3):
        x, y = (dp_share(part[:6], 0, running.ranks) for part in gpu.batch(number))
        losses.append(running.train_step(x.double(), y, gpu.loss_fn).item())
    orders = {p.is_contiguous() for p in running.parameters()}
    result = {"losses": losses, "state": running.state_dict(), "orders": orders}
    running.close()
    return result
