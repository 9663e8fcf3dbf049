"""The end of a static step: what a bad batch leaves, and hyperparameters that change, for every kind of optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart import compat
from snnpart.errors import ConfigError, SnnpartError
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch

O, L = torch.optim, torch.optim.lr_scheduler
OPTIMIZERS: dict[str, tuple[str, Callable[[Any], O.Optimizer]]] = {
    "sgd": ("fused", lambda p: O.SGD(p, lr=0.1)),
    "momentum": ("fused", lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.3)),
    "nesterov": ("fused", lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adamw": ("fused", lambda p: O.AdamW(p, lr=0.02)),
    "amsgrad": ("fused", lambda p: O.Adam(p, lr=0.02, amsgrad=True)),
    "rmsprop": ("capturable", lambda p: O.RMSprop(p, lr=0.01, momentum=0.9, centered=True)),
    "nadam": ("capturable", lambda p: O.NAdam(p, lr=0.01)),
    "adamax": ("capturable", lambda p: O.Adamax(p, lr=0.01)),
    "radam": ("capturable", lambda p: O.RAdam(p, lr=0.01)),
    "adadelta": ("capturable", lambda p: O.Adadelta(p)),
    "asgd": ("capturable", lambda p: O.ASGD(p, lr=0.02)),
    "rprop": ("capturable", lambda p: O.Rprop(p, lr=0.001)),
    "adagrad": ("host", lambda p: O.Adagrad(p, lr=0.05, eps=1e-5)),
}


def launched(optimizer: Callable[[Any], O.Optimizer], execution: str, **options: Any) -> RunningProgram:
    return launch(compile_by_hand(make_net()), optimizer=optimizer, execution=execution, **options)


def held(running: RunningProgram) -> dict[str, Tensor]:
    """Copies of all that a step may change: parameters, buffers, and the optimizer's state."""
    assert running.optimizer is not None
    states = running.optimizer.state_dict()["state"]
    inner = {f"{i}.{k}": x for i, state in states.items() for k, x in state.items() if isinstance(x, Tensor)}
    return {name: x.detach().clone() for name, x in {**running.state_dict(), **inner}.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(
            got[name], x, rtol=tolerance, atol=tolerance, check_dtype=False, msg=lambda m: f"{name}: {m}"
        )


def through(
    name: str, execution: str, at: int, clip: float | None, where: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and all state of 20 good steps, a bad one before step `at`, which must not change anything."""
    kind, factory = OPTIMIZERS[name]
    losses = []
    with launched(factory, execution, clip_grad_norm=clip) as running:
        assert running._execution.update.kind == kind
        for number in range(20):
            if number == at:
                before = held(running)
                x, y = batch(50, 4)
                loss = (lambda o, t: F.cross_entropy(o, t) * 1e308 * 1e10) if where == "gradients" else F.cross_entropy
                with pytest.raises(SnnpartError, match="NaN or Inf"):
                    running.train_step(x * (float("nan") if where == "inputs" else 1.0), y, loss)
                if where == "inputs":
                    assert_same(held(running), before)
                assert all(torch.isfinite(x).all() for x in held(running).values())
            losses.append(running.train_step(*batch(number, 4), F.cross_entropy).item())
        return losses, held(running)


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_batch_changes_nothing(name: str, at: int) -> None:
    """Neither parameters nor the optimizer's state, its counters, or the statistics of BatchNorm; also as first."""
    eager, static = (through(name, execution, at, None, "inputs") for execution in ("eager", "cuda_graph"))
    assert len(set(eager[0])) == 20
    assert static[0] == pytest.approx(eager[0], abs=1e-9)
    assert_same(static[1], eager[1], 1e-9)


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bad_gradients_change_no_parameter(name: str, at: int) -> None:
    """As in eager steps the statistics of BatchNorm have seen the batch, which is a good one."""
    eager, static = (through(name, execution, at, 0.1, "gradients") for execution in ("eager", "cuda_graph"))
    assert static[0] == pytest.approx(eager[0], abs=1e-9)
    assert_same(static[1], eager[1], 1e-9)


def test_bad_inputs_leave_the_loss_scale() -> None:
    with launched(OPTIMIZERS["adamw"][1], "cuda_graph", precision="fp16") as running:
        assert running.loss_scale is not None
        for number in range(3):
            running.train_step(*batch(number, 4), F.cross_entropy)
        scale, before = running.loss_scale.state_dict(), held(running)
        with pytest.raises(ConfigError, match="the inputs of train step 4 hold NaN or Inf"):
            running.train_step(batch(0, 4)[0] * float("nan"), batch(0, 4)[1], F.cross_entropy)
        assert running.loss_scale.state_dict() == scale == {"factor": 2.0**16, "good": 3}
        assert_same(held(running), before)
        running.train_step(*batch(4, 4), F.cross_entropy)
        assert running.loss_scale.state_dict() == {"factor": 2.0**16, "good": 4}


def test_the_first_batch_is_looked_at_before_anything_is_sent() -> None:
    with launched(OPTIMIZERS["adamw"][1], "cuda_graph") as running:
        with pytest.raises(ConfigError, match="24 of 24 numbers are NaN or Inf") as refused:
            running.train_step(batch(0, 4)[0] * float("inf"), batch(0, 4)[1], F.cross_entropy)
        assert "input 'x'" in str(refused.value)


def test_nothing_is_kept_where_nobody_looks() -> None:
    """With check_inputs=False a bad batch does what it does in eager steps: all becomes NaN."""
    for execution in ("eager", "cuda_graph"):
        with launched(OPTIMIZERS["rmsprop"][1], execution, check_inputs=False) as running:
            running.train_step(batch(0, 4)[0] * float("nan"), batch(0, 4)[1], F.cross_entropy)
            assert torch.isnan(running.state_dict()["bn.running_mean"]).all()


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64],
    ids=str,
)
def test_bits_are_put_back_or_kept(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(3, 4, generator=generator).mul(100).to(dtype) for _ in range(2))
    if dtype.is_floating_point:
        old[0, 0], new[0, 1], new[1, 1], new[1, 2] = float("inf"), float("nan"), -float("inf"), -0.0
    for undo, want in ((1.0, old), (2.0, old), (0.0, new)):
        tensors = [new.clone(), new.t().clone().t(), new[0, 1].clone()]
        compat.put_back(tensors, [old, old.t().clone().t(), old[0, 1]], torch.tensor(undo))
        for got, x in zip(tensors, (want, want, want[0, 1]), strict=True):
            assert got.dtype is dtype
            torch.testing.assert_close(got, x, rtol=0, atol=0, equal_nan=True)


Schedule = Callable[[O.Optimizer], Any]
CYCLES: dict[str, tuple[str, str, Schedule]] = {
    "one cycle, betas": ("adamw", "betas", lambda o: L.OneCycleLR(o, 0.05, total_steps=60)),
    "one cycle, momentum": ("nesterov", "momentum", lambda o: L.OneCycleLR(o, 0.2, total_steps=60)),
    "one cycle, rmsprop": ("rmsprop", "momentum", lambda o: L.OneCycleLR(o, 0.02, total_steps=60)),
    "cyclic, momentum": ("momentum", "momentum", lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=10)),
    "cyclic, betas": ("amsgrad", "betas", lambda o: L.CyclicLR(o, 0.001, 0.02, step_size_up=7)),
}
RATES: dict[str, Schedule] = {
    "one cycle": lambda o: L.OneCycleLR(o, 0.05, total_steps=60, cycle_momentum=False),
    "cyclic": lambda o: L.CyclicLR(o, 0.001, 0.05, step_size_up=10, cycle_momentum=False),
    "cosine": lambda o: L.CosineAnnealingLR(o, 40),
    "lambda": lambda o: L.LambdaLR(o, lambda step: 0.97**step),
    "plateau": lambda o: L.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, total_iters=8), L.ExponentialLR(o, 0.97)], [8]),
}


def scheduled(optimizer: str, schedule: Schedule, execution: str, steps: int = 50) -> dict[str, Any]:
    """Losses of steps under a scheduler of torch's, its notices, and how often each kind of step ran."""
    with launched(OPTIMIZERS[optimizer][1], execution) as running, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert running.optimizer is not None
        scheduler, losses, rates = schedule(running.optimizer), [], set()
        for number in range(steps):
            losses.append(running.train_step(*batch(number, 4), F.cross_entropy).item())
            scheduler.step(losses[-1]) if isinstance(scheduler, L.ReduceLROnPlateau) else scheduler.step()
            rates.add(running.optimizer.param_groups[0]["lr"])
        runs = [one.runs for one in running._execution.captures._passes.values()]
        return {"losses": losses, "state": held(running), "rates": rates, "runs": runs, "notices": running.notices}


def check_scheduled(optimizer: str, schedule: Schedule) -> dict[str, Any]:
    eager, static = (scheduled(optimizer, schedule, execution) for execution in ("eager", "cuda_graph"))
    assert len(set(eager["losses"])) == 50 and len(eager["rates"]) > 2
    assert static["losses"] == pytest.approx(eager["losses"], abs=1e-9)
    assert_same(static["state"], eager["state"], 1e-9)
    return static


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("optimizer", ["adamw", "nesterov", "rmsprop", "adagrad"])
def test_rates_of_schedulers_keep_one_kind_of_step(name: str, optimizer: str) -> None:
    static = check_scheduled(optimizer, RATES[name])
    assert static["runs"] == [50]
    assert len(static["notices"]) == (0 if torch.cuda.is_available() else 1)


@pytest.mark.parametrize("name", CYCLES)
def test_what_cycles_is_named_once_and_leaves_the_captured_step(name: str) -> None:
    optimizer, hyperparameter, schedule = CYCLES[name]
    static = check_scheduled(optimizer, schedule)
    assert len(static["runs"]) == 3 and static["runs"][-1] == 48
    (said,) = [notice for notice in static["notices"] if "changes from step to step" in notice]
    assert said.startswith(f"'{hyperparameter}' of ") and "cycle_momentum=False" in said
    assert len(static["notices"]) == (1 if torch.cuda.is_available() else 2)


def test_a_bad_batch_changes_nothing_where_momentum_cycles() -> None:
    with launched(OPTIMIZERS["rmsprop"][1], "cuda_graph") as running:
        assert running.optimizer is not None
        scheduler = L.OneCycleLR(running.optimizer, 0.02, total_steps=60)
        for number in range(6):
            running.train_step(*batch(number, 4), F.cross_entropy)
            scheduler.step()
        assert not running._execution.update.is_captured
        before = held(running)
        with pytest.raises(ConfigError, match="the inputs of train step 7 hold NaN or Inf"):
            running.train_step(batch(0, 4)[0] * float("nan"), batch(0, 4)[1], F.cross_entropy)
        assert_same(held(running), before)


def test_a_change_now_and_then_is_another_kind_of_step() -> None:
    with launched(OPTIMIZERS["adamw"][1], "cuda_graph") as running:
        assert running.optimizer is not None
        for number in range(8):
            for group in running.optimizer.param_groups:
                group["weight_decay"] = 0.0 if number < 4 else 0.1
            running.train_step(*batch(number, 4), F.cross_entropy)
        assert [one.runs for one in running._execution.captures._passes.values()] == [4, 4]
        assert running._execution.update.is_captured
        for group in running.optimizer.param_groups:
            group["weight_decay"] = 0.2
        running.train_step(*batch(9, 4), F.cross_entropy)
        assert "'weight_decay' of AdamW changes" in running.notices[-1] and "leave it as it is" in running.notices[-1]


def test_hyperparameters_that_cannot_be_hashed_are_compared_by_value() -> None:
    with launched(lambda p: O.AdamW(p, lr=0.01, betas=[0.9, 0.99]), "cuda_graph") as running:  # type: ignore[arg-type]
        assert running.optimizer is not None
        for number in range(3):
            for group in running.optimizer.param_groups:
                group["betas"], group["names"] = [0.9, 0.99], {"one": [number // 3]}
            running.train_step(*batch(number, 4), F.cross_entropy)
        assert [one.runs for one in running._execution.captures._passes.values()] == [3]
