"""Windows of time on real process groups: BatchNorm in a window, event frames, another T at every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.runtime.running import RunningProgram
from snnpart.runtime.signatures import KEPT
from tests.distributed.cases import det, reset
from tests.distributed.cases_time import Casts, counts, events, frame, normed, stateless, windows
from tests.distributed.jobs_time import KINDS, mean_loss
from tests.distributed.pool import Pool
from tests.distributed.reference import OneProcess, assert_same
from tests.distributed.test_cases import assert_active

JOBS = "tests.distributed.jobs_time:"
TOPOLOGIES: dict[str, dict[str, Any]] = {"dp": {}, "pp": {"pp": 2, "microbatches": 2}, "tp": {"tp": 2}}


def over_time(model: nn.Module, x: Tensor) -> Tensor:
    """[T, N, C]: the loop over [N, T, ...] that is the caller's."""
    return torch.stack([model(x[:, t]) for t in range(x.shape[1])])


def trained(lengths: list[int], kind: str, dp: int, microbatches: int = 1, single_step: bool = False) -> Any:
    """Losses and state of one process that trains on the same windows."""
    call = over_time if single_step else lambda model, x: model(x)
    one = OneProcess(
        frame() if single_step else events(),
        microbatches=microbatches,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        reset=reset,
        call=call,
    )
    batches = windows(lengths, 6, KINDS[kind])
    assert_active(one.model, lambda: call(one.model, batches[0][0]))
    loss = mean_loss if single_step else F.cross_entropy
    losses = [one.train_step(list(zip(x.tensor_split(dp), y.tensor_split(dp), strict=True)), loss) for x, y in batches]
    return losses, one.model.state_dict()


def test_a08_buffers_are_broadcast_once_a_window(pool: Pool) -> None:
    """One broadcast a dtype before the three steps, none between them; the averages move three times."""
    loss = lambda out, weights: (out.sum(0) * weights).sum() * (6 / out.shape[1])
    call = lambda model, x: torch.stack([model(step) for step in x])
    one = OneProcess(normed(), batch_dim=1, target_dim=0, call=call)
    x, w = det(3, 6, 4), det(6, 4, k=0.2)
    one.train_step(list(zip(x.tensor_split(2, 1), w.tensor_split(2, 0), strict=True)), loss)
    first, second = pool.run(JOBS + "norm_in_a_window", ranks=2)
    assert sorted(first["sent"]) == sorted(second["sent"]) == [1, 8]
    assert not torch.equal(first["own"]["bn.running_mean"], second["own"]["bn.running_mean"])
    for result in (first, second):
        assert_same(result["gradients"], one.gradients())
        assert_same(result["state"], one.model.state_dict())
        assert result["gradients"]["c.weight"].norm().item() == pytest.approx(1.537936233, abs=1e-8)
        assert int(result["own"]["bn.num_batches_tracked"]) == int(result["state"]["bn.num_batches_tracked"]) == 3


@pytest.mark.parametrize("how", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a27_integer_frames(pool: Pool, kind: str, how: str) -> None:
    x = counts(KINDS[kind], 4, 2, 4, 4)
    with torch.no_grad():
        want = Casts(stateless())(x)
    for found in pool.run(JOBS + "integers", ranks=2, kind=kind, **TOPOLOGIES[how]):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
        if kind == "int16":
            assert found.sum().item() == pytest.approx(32.35867631884588, abs=1e-9)


@pytest.mark.parametrize(("how", "kind"), [("dp", "bool"), ("pp", "int16"), ("tp", "uint8")])
def test_event_windows_of_many_lengths(pool: Pool, how: str, kind: str) -> None:
    """[N, T, C, H, W] with another T at every batch: one program for each T, compiled once, with a notice."""
    lengths = [3, 5, 3, 4, 5]
    dp = 2 if how == "dp" else 1
    losses, state = trained(lengths, kind, dp, TOPOLOGIES[how].get("microbatches", 1))
    for result in pool.run(JOBS + "train_events", ranks=2, kind=kind, lengths=lengths, **TOPOLOGIES[how]):
        assert result["losses"] == pytest.approx(losses, abs=1e-9)
        assert_same(result["state"], state)
        assert result["notices"] == [f"compiled again for {kind}[N, {t}, 2, 4, 4]" for t in (5, 4)]


def test_event_windows_of_a_single_step_network(pool: Pool) -> None:
    """`time_steps` is the T of the example; a window of another length takes as many steps as it has."""
    lengths = [3, 2, 3, 4]
    losses, state = trained(lengths, "uint8", 2, single_step=True)
    for result in pool.run(JOBS + "train_events", ranks=2, kind="uint8", lengths=lengths, single_step=True):
        assert result["losses"] == pytest.approx(losses, abs=1e-9)
        assert_same(result["state"], state)
        assert len(result["notices"]) == 2


def test_the_number_of_programs_is_bounded() -> None:
    """The one used longest ago makes room; the launched one stays."""
    example = windows([1], 2)[0][0]
    program = parallelize(frame(), example_inputs=example, input_layout="NTCHW", time_steps=1, verify="off")
    with program.launch() as running:
        assert isinstance(running, RunningProgram)
        for steps in (*range(1, KEPT + 3), KEPT + 2, 1, 2):
            x = windows([steps], 2)[0][0]
            model = frame()
            torch.testing.assert_close(running.eval_step(x), over_time(model, x), rtol=0, atol=1e-9)
        kept = [notice.split(", ")[1] for notice in running.notices]
        assert kept == [str(steps) for steps in (*range(2, KEPT + 3), 2)]
        assert len(running._signatures._others) == KEPT


@pytest.mark.parametrize("how", TOPOLOGIES)
def test_frames_without_a_cast(pool: Pool, how: str) -> None:
    """The user's own error, on all ranks at once, when compiling and when a batch of one rank has the wrong dtype."""
    results = pool.run(JOBS + "without_cast", ranks=2, timeout=60.0, **TOPOLOGIES[how])
    for result in results:
        for moment in ("compiling", "stepping"):
            kind, text = result[moment]
            assert kind == "TraceError" and "Input type (short int) and bias type (double) should be the same" in text
        assert "rank 1" in result["stepping"][1]
        assert result["loss"] == results[0]["loss"]


def test_any_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    results = pool.run(JOBS + "fails_for_itself", ranks=2, timeout=60.0)
    for name, text, loss in results:
        assert name == "RuntimeError" and "Unsendable: bad luck" in text
        assert loss == results[0][2]
