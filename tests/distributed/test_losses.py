"""Losses that are sums, weighted means, means over some samples, or nothing of the kind: exact, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import CASES
from tests.distributed.jobs_losses import LOSSES, targets
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same
from tests.distributed.test_cases import name_of

JOB = "tests.distributed.jobs_losses:run_loss"
PP2 = {"pp": 2, "microbatches": 3}
GPIPE = {**PP2, "schedule": "gpipe"}


def one_process(loss: str) -> dict[str, Any]:
    """The loss of the whole batch at once."""
    case = CASES["wide"]
    model = case.model()
    value = LOSSES[loss](model(case.batches()[0][0]), targets(loss))
    value.backward()
    return {"loss": value.item(), "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(
    ("loss", "reduction", "ranks", "how"),
    [
        ("weighted", "weights", 2, PP2),
        ("weighted", "weights", 2, {**PP2, "schedule": "zbv", "microbatches": 4}),
        ("weighted", "weights", 4, PP2),
        ("ignoring", "weights", 2, PP2),
        ("ignoring", "weights", 4, PP2),
        ("ignoring", "weights", 2, {"dp": "ddp", "microbatches": 2}),
        ("summed", "sum", 2, PP2),
        ("summed", "sum", 4, PP2),
        ("summed", "sum", 2, {"dp": "fsdp2"}),
        ("weighted", "merged", 2, GPIPE),
        ("ignoring", "merged", 2, GPIPE),
        ("spread", "merged", 2, GPIPE),
        ("mean", "merged", 4, GPIPE),
        ("mean", "mean", 4, PP2),
    ],
    ids=name_of,
)
def test_equal_to_the_loss_of_the_whole_batch(
    pool: Pool, loss: str, reduction: str, ranks: int, how: dict[str, Any]
) -> None:
    wanted = one_process(loss)
    for result in pool.run(JOB, ranks=ranks, name="wide", loss=loss, reduction=reduction, **how):
        assert result["loss"] == pytest.approx(wanted["loss"], abs=1e-9)
        assert result["eval"] == pytest.approx(wanted["loss"], abs=1e-9)
        assert_same(result["gradients"], wanted["gradients"])


@pytest.mark.parametrize("loss", ["weighted", "summed", "spread"])
def test_a_loss_that_is_no_mean_is_refused(pool: Pool, loss: str) -> None:
    """On every rank, and nothing is left of the step."""
    for result in pool.run(JOB, ranks=2, name="wide", loss=loss, reduction="mean", **PP2):
        assert "it is not what loss_reduction='mean' says" in result["error"]
        assert result["gradients"] == {}


def test_merged_wants_gpipe(pool: Pool) -> None:
    (result, _) = pool.run(JOB, ranks=2, name="wide", loss="weighted", reduction="merged", **PP2)
    assert "waits for all forwards, which schedule='1f1b' does not" in result["error"]
    (result, _) = pool.run(JOB, ranks=2, name="wide", loss="weighted", reduction="median", **PP2)
    assert "loss_reduction='median' is not known" in result["error"] and "mean, sum, merged" in result["error"]
