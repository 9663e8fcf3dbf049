"""numerics="fold": launched ranks evaluate with folded norms what they evaluate without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool

JOB = "tests.distributed.jobs_fold:evaluated"


@pytest.mark.parametrize(
    "topology",
    [
        {"ranks": 4, "tp": 2, "pp": 2, "microbatches": 2, "split_at": ["3"], "shard": {"0": "column", "3": "column"}},
        {"ranks": 2, "dp": "fsdp2"},
    ],
    ids=str,
)
def test_a_folded_evaluation_is_the_exact_one(pool: Pool, topology: dict[str, Any]) -> None:
    exact, folded = (pool.run(JOB, numerics=numerics, **topology) for numerics in ("exact", "fold"))
    for (wanted, none), (found, gone) in zip(exact, folded, strict=True):
        assert (none, gone) == (0, 2)
        assert 0.01 < float(wanted.mean()) < 0.99
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
