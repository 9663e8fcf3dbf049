"""Fused neurons' kernels, in Triton's interpreter on the CPU: they give what the separate operations give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.runtime.kernels.fused import BOTH_LAYOUTS, cases

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, bool], Any]:
    """What the cases gave in a process of their own: Triton is told to interpret before it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.kernels.fused"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["case"], line["last"]): line for line in lines}


LAYOUTS = [
    (name, channels_last)
    for number, name in enumerate(cases())
    for channels_last in ((False, True) if name in BOTH_LAYOUTS else (number % 2 == 0,))
]


@pytest.mark.parametrize(("name", "channels_last"), LAYOUTS)
def test_kernels_give_what_the_separate_operations_give(
    reports: dict[tuple[str, bool], Any], name: str, channels_last: bool
) -> None:
    report = reports[name, channels_last]
    assert report["fused"] == 1
    assert 0.01 < report["rate"] < 0.99
    assert report["silent"] == []
    limit = 1e-9 if str(cases()[name].dtype) == "torch.float64" else 1e-5
    assert {key: value for key, value in report["errors"].items() if value > limit} == {}
