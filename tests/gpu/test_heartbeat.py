"""A rank that dies or hangs while the others wait inside a replayed graph: they end within the timeout and name it."""

from __future__ import annotations

import re

import pytest
import torch

from tests.gpu.heartbeat import said

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.mark.parametrize(
    ("how", "text"),
    [("dies", r"rank 1 \(dp 0, pp 1, tp 0\) stopped answering"), ("hangs", r"rank 1 \(dp 0, pp 1, tp 0\)")],
)
def test_the_others_are_ended_inside_a_captured_step(how: str, text: str) -> None:
    code, stderr = said(how, "cuda")
    assert code != 0 and "captured 1" in stderr
    assert "rank 0 (dp 0, pp 0, tp 0) is in waiting for the device, in a captured step" in stderr
    assert re.search(text, stderr), stderr[-3000:]
