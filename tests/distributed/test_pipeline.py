"""Every schedule on real process groups equals one process in float64: losses, gradients, buffers, outputs, updates."""

from __future__ import annotations

from typing import Any

import pytest

from snnpart import schedules
from tests.distributed.pool import Pool
from tests.distributed.test_cases import check, name_of

SPLIT = ("interleaved-zb", "zbv")
MANY = ("interleaved-1f1b", *SPLIT)


@pytest.mark.parametrize("schedule", schedules.NAMES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_skips_and_uneven_microbatches_on_two_ranks(pool: Pool, schedule: str, microbatches: int) -> None:
    """Five samples: with three microbatches 2 + 2 + 1. Interleaved schedules have four stages here."""
    check(pool, "A14", 2, {"pp": 2, "schedule": schedule, "microbatches": microbatches})


@pytest.mark.parametrize("schedule", MANY)
@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, {"pp": 2}), (4, {"pp": 2, "dp": "ddp"}), (4, {"pp": 2, "dp": "fsdp2"}), (4, {"pp": 2, "tp": 2})],
    ids=name_of,
)
def test_batch_norm_and_two_updates(pool: Pool, schedule: str, ranks: int, how: dict[str, Any]) -> None:
    check(pool, "norms", ranks, {**how, "schedule": schedule, "microbatches": 2}, learn=True)
