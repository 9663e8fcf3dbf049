"""What captured steps on one GPU do beside being equal to eager ones: dropout, shapes, failures, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from snnpart.errors import ConfigError
from snnpart.runtime.running import RunningProgram
from tests.gpu.jobs_checkpoint import uninterrupted, with_checkpoint
from tests.gpu.jobs_execution import batch, launched, loss_fn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Float32 without TF32, and the same algorithms in each run."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before, kept = [item.allow_tf32 for item in backends], torch.backends.cudnn.deterministic
    for item in backends:
        item.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    yield
    for item, value in zip(backends, before, strict=True):
        item.allow_tf32 = value
    torch.backends.cudnn.deterministic = kept


def losses(
    mode: str, batches: list[tuple[Tensor, Tensor]], loss: Callable[..., Tensor] = loss_fn, **options: Any
) -> tuple[list[float], int, list[str]]:
    """The losses of steps on these batches, how many kinds of steps were captured, and the notices."""
    torch.manual_seed(3)
    running = launched("single", mode, "fp32", **options)
    try:
        found = [running.train_step(x, y, loss) for x, y in batches]
        return [float(x) for x in found], running._execution.captures.captured, list(running.notices)
    finally:
        running.close()


@contextmanager
def nobody_waits() -> Iterator[None]:
    """An error where an operation waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_each_size_has_a_graph_and_a_rare_one_runs_without() -> None:
    """Twice the usual size, in turn with it; the smallest comes once."""

    def sized(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number)
        return (x, y) if number % 2 else (torch.cat([x, x]), torch.cat([y, y]))

    batches = [sized(number) for number in range(1, 13) if number != 9]
    x, y = batch(30)
    batches.insert(7, (x[:5], y[:5]))
    got, captured, notices = losses("cuda_graph", batches)
    want, _, _ = losses("eager", batches)
    assert captured == 2 and not any("uncaptured" in notice for notice in notices)
    assert len(set(want)) == len(want)
    assert got == pytest.approx(want, rel=1e-4)


def test_a_step_that_waits_for_the_device_is_not_captured_and_says_so_once() -> None:
    def waits(out: Tensor, target: Tensor) -> Tensor:
        loss = loss_fn(out, target)
        return loss * 2 if loss.item() > 100 else loss

    batches = [batch(number) for number in range(6)]
    got, captured, notices = losses("cuda_graph", batches, waits)
    want, _, _ = losses("eager", batches)
    assert captured == 0
    assert len([notice for notice in notices if "steps run uncaptured: the capture failed on rank 0" in notice]) == 1
    assert got == pytest.approx(want, rel=1e-4)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2**-9, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=2**-6, momentum=0.875, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=2**-10),
    "nadam": lambda p: torch.optim.NAdam(p, lr=2**-9),
    "adamax": lambda p: torch.optim.Adamax(p, lr=2**-9),
}


def held(running: RunningProgram) -> list[Tensor]:
    """Copies of parameters, buffers and the optimizer's state."""
    assert running.optimizer is not None
    state = [x for inner in running.optimizer.state.values() for x in inner.values() if isinstance(x, Tensor)]
    buffers = (x for _, x in running.named_buffers())
    return [x.detach().clone() for x in (*running.parameters(), *buffers, *state)]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replay_of_a_bad_batch_changes_nothing(name: str, clip: float | None) -> None:
    """And the steps after it are those of a run without it."""

    def run(bad: bool) -> list[float]:
        torch.manual_seed(3)
        with launched("single", "cuda_graph", "fp32", optimizer=OPTIMIZERS[name], clip_grad_norm=clip) as running:
            found = [float(running.train_step(*batch(number), loss_fn)) for number in range(6)]
            assert running._execution.captures.captured == 1, running.notices
            assert running._execution.update.is_captured
            if bad:
                before, (x, y) = held(running), batch(50)
                with pytest.raises(ConfigError, match="the inputs of train step 7 hold NaN or Inf"):
                    running.train_step(x * float("nan"), y, loss_fn)
                    running.settle()
                assert all(map(torch.equal, held(running), before))
            return found + [float(running.train_step(*batch(number), loss_fn)) for number in range(6, 12)]

    want = run(False)
    assert len(set(want)) == len(want)
    assert run(True) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("cycle", [True, False])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_steps_under_a_cycle_are_captured(name: str, cycle: bool) -> None:
    """Where momentum cycles the optimizer's step alone is not; nothing waits for it. Rates are exact in float32."""
    batches = [tuple(x.pin_memory() for x in batch(number)) for number in range(12)]

    def run(mode: str) -> list[float]:
        torch.manual_seed(3)
        with launched("single", mode, "fp32", optimizer=OPTIMIZERS[name]) as running:
            assert running.optimizer is not None
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                running.optimizer, 2**-8, total_steps=32, cycle_momentum=cycle
            )
            found = []
            for number, (x, y) in enumerate(batches):
                running.settle()
                for group in running.optimizer.param_groups:
                    group["lr"] = float(torch.tensor(group["lr"], dtype=torch.float32))
                with nobody_waits() if mode == "cuda_graph" and number > 8 else nullcontext():
                    found.append(running.train_step(x, y, loss_fn))
                scheduler.step()
            assert running._execution.captures.captured == (mode == "cuda_graph"), running.notices
            assert len([notice for notice in running.notices if "changes from step to step" in notice]) == (
                cycle and mode == "cuda_graph"
            )
            return [float(x) for x in found]

    assert run("cuda_graph") == pytest.approx(run("eager"), rel=1e-4)


def test_a_checkpoint_in_the_middle_of_captured_steps(tmp_path: Path) -> None:
    """Training goes on in the same program, and from the file in one whose steps were captured before it was loaded."""
    want = uninterrupted("single", "cuda_graph", "fp32")
    for got in with_checkpoint("single", "cuda_graph", "fp32", tmp_path).values():
        assert got["captured"] >= 1
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)
        for key, value in want["state"].items():
            torch.testing.assert_close(got["state"][key], value, rtol=1e-3, atol=1e-4)


def test_dropout_draws_anew_in_each_replay_and_again_from_a_seed() -> None:
    """The same batch, and a rate of learning that changes nothing: only the masks differ."""

    def run() -> list[float]:
        torch.manual_seed(3)
        running = launched("single", "cuda_graph", "fp32", dropout=0.5)
        try:
            for group in running.optimizer.param_groups if running.optimizer else ():
                group["lr"], group["weight_decay"] = 0.0, 0.0
            found = [float(running.train_step(*batch(0), loss_fn)) for _ in range(10)]
            assert running._execution.captures.captured == 1
            return found
        finally:
            running.close()

    first = run()
    assert len(set(first)) == len(first)
    assert run() == first


def test_captured_steps_on_pinned_batches_wait_for_nothing() -> None:
    torch.manual_seed(3)
    running = launched("single", "cuda_graph", "fp32")
    try:
        batches = [tuple(x.pin_memory() for x in batch(number)) for number in range(8)]
        for x, y in batches[:5]:
            running.train_step(x, y, loss_fn)
        assert running._execution.captures.captured == 1
        with nobody_waits():
            found = [running.train_step(x, y, loss_fn) for x, y in batches[5:]]
        assert all(torch.isfinite(x) for x in found) and len(set(map(float, found))) == 3
    finally:
        running.close()
