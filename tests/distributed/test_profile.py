"""`snnpart profile` on two ranks: one plan although each rank measures its own machine, one text, a trace a rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"dp": "fsdp2"}], ids=["tp", "pp", "fsdp2"])
def test_ranks_are_profiled_together(pool: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = pool.run("tests.distributed.jobs_profile:profiled", ranks=2, folder=str(tmp_path), **options)
    assert second == ""
    assert "roofline" in first and "of it communication" in first and "beyond it" in first
    step = next(line for line in first.splitlines() if line.startswith("computing"))
    assert float(step.split("communication")[1].split()[0]) > 0
    assert ("waiting " in first) is ("pp" in options)
    assert {path.name for path in tmp_path.iterdir()} == {"step.json", "step-rank1.json"}


def test_the_pipeline_s_waiting_is_measured(pool: Pool) -> None:
    """Almost all work is the first rank's: the second waits for it, nearly always, as predicted."""
    first, _ = pool.run("tests.distributed.jobs_profile:uneven", ranks=2)
    line = next(line for line in first.splitlines() if line.startswith("waiting"))
    share, predicted, *each = (float(number) for number in re.findall(r"\d+\.\d", line))
    assert share == pytest.approx(sum(each) / 2, abs=0.1)
    assert each[1] > 60 and each[1] > 2 * each[0]
    assert 30 < share < 70 and 30 < predicted < 70
