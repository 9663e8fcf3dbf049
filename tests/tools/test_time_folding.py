"""The time-folding benchmark: its table, its limits, its short form."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tools.bench.rows import COLUMNS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/bench/time_folding.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("time_folding_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_missed_limit_is_a_failed_row(bench: ModuleType) -> None:
    first, *_ = bench.loops(quick=False)
    for ours, status in ((0.5, "ok"), (0.7, "failed")):
        (row,) = bench.rows(bench.Measured(first, (1.0,) * 3, (ours,) * 3), "cpu", False, False)
        assert tuple(row) == COLUMNS
        assert row["status"] == status and row["note"].endswith("at least 1.6 wanted")


def test_kernels_have_a_row_and_losses_must_agree(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "machine", lambda device: "a GPU")
    first, *_ = bench.loops(quick=False)
    counts = Counter({"multiply": 900}), Counter({"void at::native::add<float>": 400, "sum": 100})
    measured = bench.Measured(first, (1.0,), (0.5,), kernels=counts, losses=(2.0, 2.1))
    times, kernels = bench.rows(measured, "cuda", False, False)
    assert (kernels["metric"], kernels["ratio"], kernels["status"]) == ("kernels", "1.800", "failed")
    assert "most launched: add<float> 400 times, sum 100 times" in kernels["note"]
    assert times["status"] == "failed" and "losses differ: 2 and 2.1" in times["note"]


def test_rows_of_other_machines_stay(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "time_folding.csv"
    first, *_ = bench.loops(quick=False)
    for machine in ("one", "two", "two"):
        monkeypatch.setattr(bench, "machine", lambda device, name=machine: name)
        bench.write(path, bench.rows(bench.Measured(first, (1.0,), (0.5,)), "cpu", False, False))
    with path.open() as file:
        assert [row["machine"] for row in csv.DictReader(file)] == ["one", "two"]
    assert "<svg" in bench.plot(path).read_text()


@pytest.mark.all
@pytest.mark.timeout(200)
def test_quick_form_runs(tmp_path: Path) -> None:
    for package in ("spikingjelly", "snntorch", "norse"):
        pytest.importorskip(package)
    path = tmp_path / "quick.csv"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output", str(path)], capture_output=True, text=True, timeout=190
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and {row["status"] for row in rows} == {"ok"}
