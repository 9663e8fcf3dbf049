"""tools/bench/kernel_options.py in its short form, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.all
def test_every_option_is_measured_beside_its_default() -> None:
    command = [sys.executable, "tools/bench/kernel_options.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.partition(" N=2: ")[0] for line in done.stdout.splitlines()]
    assert lines == [f"SEW-ResNet34 {name}" for name in ('saved="packed"', 'fuse="auto"', 'numerics="fold"')]
