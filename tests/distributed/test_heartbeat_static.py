"""What `tests/gpu/test_heartbeat.py` sees of captured steps, on static steps over gloo, in processes of their own."""

from __future__ import annotations

import re

import pytest

from tests.gpu.heartbeat import said


@pytest.mark.parametrize("how", ["dies", pytest.param("hangs", marks=pytest.mark.all)])
def test_a_static_step_names_the_rank(how: str) -> None:
    code, stderr = said(how, "cpu")
    assert code != 0 and "captured 0" in stderr
    assert re.search(r"rank 1 \(dp 0, pp 1, tp 0\)", stderr), stderr[-3000:]
