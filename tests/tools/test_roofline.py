"""The benchmark against the roofline: its short form, its rows, and what stands where there is no GPU."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snnpart.costs import CPU
from snnpart.runtime.kernel_kinds import Share
from snnpart.runtime.profiling import Whole
from tools.bench import roofline as bench
from tools.bench.rows import COLUMNS, read, replaced, row, write

ASKED = replace(bench.QUICK, batch=256, precision="bf16")


@pytest.mark.all
def test_the_short_form_measures_a_step_and_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("spikingjelly")
    target = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["roofline", "--quick", "--output", str(target)])
    assert bench.main() == 0
    share, *kernels = read(target)
    assert tuple(share) == COLUMNS and share["metric"] == "share of roofline" and float(share["ours"]) > 0
    times = {one["metric"]: float(one["ours"]) for one in kernels}
    assert times["time: convolution forward"] > 0 and "time: gaps" in times
    assert "beyond it" in capsys.readouterr().out


def test_a_share_below_what_is_asked_for_fails() -> None:
    found = bench.Measured(
        (0.02, 0.03, 0.025), Whole(25e3, 24e3, 0.0), 10e3, [Share("pooling", 300.0, 100.0, "max_pool")], CPU
    )
    share, pooling, gaps = bench.rows(ASKED, found)
    assert (share["ours"], share["status"], share["repeats"], share["spread"]) == ("0.400", "failed", 3, "0.400")
    assert "roofline 10.000 ms of a step of 25.000 ms" in share["note"] and "at least 0.45" in share["note"]
    assert (pooling["metric"], pooling["ours"]) == ("time: pooling", "0.300")
    assert pooling["note"] == "roofline 0.100 ms; 1.2 % of the step; the longest: max_pool"
    assert (gaps["metric"], gaps["ours"]) == ("time: gaps", "1.000")
    better = replace(found, least=12e3)
    assert bench.rows(ASKED, better)[0]["status"] == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_gpu_the_row_says_so_and_measured_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["roofline", "--output", str(target)])
    assert bench.main() == 0
    (only,) = read(target)
    assert only["status"] == "not-run" and "tools/bench/roofline.py --model SEW-ResNet34 --batch 256" in only["note"]
    write(target, [{**only, "status": "ok", "ours": "0.5"}])
    assert bench.main() == 0
    assert [one["status"] for one in read(target)] == ["ok"]


def test_rows_of_all_benchmarks_have_the_same_columns(tmp_path: Path) -> None:
    made = row("bench", "point", "metric", "s", ours=1.5)
    assert tuple(made) == COLUMNS and (made["repeats"], made["status"], made["peer"]) == (1, "ok", "")
    with pytest.raises(KeyError, match="no columns: .'speed'"):
        row("bench", "point", "metric", "s", speed=1)
    write(tmp_path / "a/rows.csv", [made])
    with (tmp_path / "a/rows.csv").open(newline="") as file:
        (back,) = csv.DictReader(file)
    assert back["ours"] == "1.5" and read(tmp_path / "none.csv") == []
    other = row("bench", "other", "metric", "s")
    new = {**made, "ours": 2}
    assert replaced([made, other], [new], key=lambda one: one["point"]) == [other, new]
