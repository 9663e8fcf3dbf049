"""The compile-time benchmark in its short form, its table and its slopes."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.bench.rows import COLUMNS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/bench/compile_time.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_time_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measured(bench: ModuleType, power: float) -> list:
    """Made-up measurements that grow as x ** power."""
    every = [*bench.points(False)]
    return [bench.Measured(p, (p.x**power,) * 3) for p in every]


def test_slope_is_the_power(bench: ModuleType) -> None:
    assert bench.slope(measured(bench, 1.4)[:5]) == pytest.approx(1.4)


def test_a_missed_limit_is_a_failed_row(bench: ModuleType) -> None:
    rows = [row for row in bench.rows(measured(bench, 1.4), quick=False) if row["metric"] != "processor seconds"]
    table = {row["point"]: row for row in rows}
    assert tuple(table["sew_resnet34"]) == COLUMNS
    assert table["slope_over_T"]["status"] == "failed" and table["slope_over_T"]["note"] == "limit 1.15"
    assert table["sew_resnet18"]["status"] == "ok"


def test_the_plot_is_made_from_the_table(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "compile_time.csv"
    bench.write(path, bench.rows(measured(bench, 1.0), quick=False))
    assert bench.plot(path) == path.with_suffix(".svg") and "<svg" in path.with_suffix(".svg").read_text()


@pytest.mark.all
@pytest.mark.timeout(200)
def test_quick_form_runs(tmp_path: Path) -> None:
    pytest.importorskip("spikingjelly")
    pytest.importorskip("snntorch")
    path = tmp_path / "quick.csv"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output", str(path)], capture_output=True, text=True, timeout=190
    )
    assert path.exists(), done.stderr
    with path.open() as file:
        points = [row["point"] for row in csv.DictReader(file)]
    assert points[:4] == ["sew_resnet18", "sew_resnet34", "snntorch_loop_T5", "snntorch_loop_T10"]
