"""What captured steps on one GPU do beside being equal to eager ones: dropout, shapes, failures, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

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
