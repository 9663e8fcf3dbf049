"""A tensor-parallel rank runs its steps without the other one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.all
def test_one_rank_of_two_makes_its_steps() -> None:
    small = ("--size", "32", "--batch", "2", "--warm", "1", "--steps", "1", "--device", "cpu")
    command = [sys.executable, "tools/bench/rank_alone.py", "--model", "Spikformer-S", "--tp", "2", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert json.loads(line.removeprefix("RESULT "))["images_per_second"] > 0
