"""Spikes on the wire of a process group: as many bytes as the report says, and nothing else arrives."""

from __future__ import annotations

import torch

from tests.distributed.pool import Pool


def test_gathers_bring_the_bytes_that_the_report_counts(pool: Pool) -> None:
    for found in pool.run("tests.distributed.jobs_bits:sent_in_evaluation", ranks=2):
        assert found["seen"] == found["report"] == [16, 32, 32, 48]
        assert torch.equal(found["outputs"], found["want"]) and float(found["want"].max()) >= 2
