"""The zoo of public models on real process groups with stages: equal to one process, or refused by name."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tools.zoo import jobs
from tools.zoo.catalogue import ZOO

QUICK = ("B12-snn",)
ERRORS = ("TraceError", "PlanError", "ConfigError", "VerifyError")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.all]) for n in ZOO])
def test_stages_and_stages_with_shared_channels(pool: Pool, name: str) -> None:
    """pp 2 under 1F1B and tp 2 x pp 2 under zbv, two microbatches."""
    for topology in ({"pp": 2}, {"tp": 2, "pp": 2, "schedule": "zbv"}):
        outcome = jobs.check(pool, name, microbatches=2, **topology)
        if name in QUICK:
            assert outcome.verdict == "equal", outcome
        assert outcome.verdict in ("equal", "refused"), (topology, outcome)
        if outcome.verdict == "refused":
            assert outcome.note.partition(":")[0] in ERRORS, (topology, outcome)
