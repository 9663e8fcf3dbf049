"""numerics="fold" and saved="packed" on launched ranks: they evaluate and learn what they do without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.jobs_rounding import stepped
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


@pytest.mark.parametrize(
    "topology",
    [{"ranks": 2, "dp": "fsdp2"}, {"ranks": 2, "pp": 2, "schedule": "interleaved-zb", "microbatches": 4}],
    ids=str,
)
def test_gradients_of_packed_spikes_are_those_of_plain_ones(pool: Pool, topology: dict[str, Any]) -> None:
    """Also where backward comes in halves and goes through the kept values twice."""
    loss, gradients, _, _ = stepped("fp32")
    job = "tests.distributed.jobs_rounding:stepped"
    for got, found, _, _ in pool.run(job, neuron_dtype="fp32", saved="packed", **topology):
        assert got == pytest.approx(loss, rel=1e-12)
        for name, grad in gradients.items():
            assert float(grad.abs().max()) > 0
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12, msg=name)
