"""Parameters of which several stages hold a copy: losses, gradients, updates and state of one process."""

from __future__ import annotations

from typing import Any

import pytest

from snnpart.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_cases import check, name_of

ENDS = {"tied ends": ("emb.weight",), "shared conv": ("conv.bias", "conv.weight", "scale")}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {"pp": 2, "schedule": "gpipe", "microbatches": 1}),
        (2, {"pp": 2, "schedule": "zbv", "microbatches": 3}),
        (3, {"pp": 3, "schedule": "interleaved-zb", "microbatches": 3}),
        (4, {"pp": 4, "schedule": "1f1b", "microbatches": 5}),
        (4, {"pp": 2, "dp": "ddp", "schedule": "1f1b", "microbatches": 2}),
        (4, {"pp": 2, "dp": "fsdp2", "schedule": "interleaved-1f1b", "microbatches": 2}),
        (4, {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 2}),
    ],
    ids=name_of,
)
def test_copies_take_the_steps_of_one_parameter(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """Two updates with clipping, whose norm counts each number once; the copies stay equal to the bit."""
    results = check(pool, name, ranks, how, learn=True, clip=0.05)
    plan = Plan.from_json(results[0]["plan"])
    assert plan.tied == ENDS[name]
