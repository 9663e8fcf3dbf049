"""`snnpart profile` on two ranks: one plan although each rank measures its own machine, one text, a trace a rank."""

from __future__ import annotations

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
    assert {path.name for path in tmp_path.iterdir()} == {"step.json", "step-rank1.json"}
