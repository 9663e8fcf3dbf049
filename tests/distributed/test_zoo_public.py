"""The zoo of public models on real process groups with stages: equal to one process, or refused by name."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tools.zoo import jobs
from tools.zoo.catalogue import ZOO

QUICK = ("B12-snn",)
REFUSED = {
    ("B15-closed-over", 2): "ConfigError: network 'ClosedOver': a batch cannot be cut into 2 microbatches",
    ("B15-closed-over", 4): "ConfigError: network 'ClosedOver': a batch cannot be cut into 2 microbatches",
}
"""By name and number of stages, how the refusal begins; all others run."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.all]) for n in ZOO])
def test_stages_and_stages_with_shared_channels(pool: Pool, name: str) -> None:
    """pp 2 under 1F1B and tp 2 x pp 2 under zbv, which has four stages, two microbatches."""
    for stages, topology in ((2, {"pp": 2}), (4, {"tp": 2, "pp": 2, "schedule": "zbv"})):
        outcome = jobs.check(pool, name, microbatches=2, **topology)
        reason = REFUSED.get((name, stages))
        assert outcome.verdict == ("equal" if reason is None else "refused"), (topology, outcome)
        assert outcome.note.startswith(reason or ""), (topology, outcome)
