"""The vision benchmarks where there is no GPU: their points, rows, and what is kept of earlier ones."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from tools.bench.gpu_loops import points as loops
from tools.bench.vision_points import Point, training_points
from tools.bench.vision_rows import MEMORY, RATE, Bench, compared, main, plot

BENCH = Bench("vision_train", training_points)


def test_the_points_are_those_that_are_asked_for() -> None:
    names = [point.name for point in training_points()]
    assert len(set(names)) == len(names)
    assert {"SEW-ResNet34 DDP2 G=32", "SEW-ResNet34 1GPU G=32", "Spikformer-S PP2 G=256"} <= set(names)
    point = Point("SEW-ResNet34", "DDP2", 512)
    assert point.options(ours=True)[:4] == ["--model", "SEW-ResNet34", "--batch", "256"]
    assert point.gpus == 2


def test_ratios_say_how_many_times_better_ours_is() -> None:
    point = Point("SEW-ResNet34", "1GPU", 32)
    rate = compared(BENCH, point, "eager", RATE, [10.0, 12.0, 11.0], [50.0, 60.0, 55.0], 4.0)
    assert (rate["peer"], rate["ours"], rate["ratio"], rate["status"]) == ("11", "55", "5", "ok")
    assert rate["spread"] == f"{10 / 55:.3f}" and rate["repeats"] == 3
    memory = compared(BENCH, point, "eager", MEMORY, [4.0], [2.0], 3.0)
    assert (memory["ratio"], memory["status"], memory["note"]) == ("2", "failed", "less than 3 times")


def test_the_plot_is_drawn_from_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    point = Point("SEW-ResNet34", "1GPU", 32)
    rows = [compared(BENCH, point, "eager", metric, [10.0], [50.0], 0.0) for metric in (RATE, MEMORY)]
    rows.append({**rows[0], "point": "Spikformer-S 1GPU G=32", "ours": "", "peer": "", "status": "not-run"})
    plot(rows, tmp_path / "made.svg")
    assert "1GPU G=32" in (tmp_path / "made.svg").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("bench", [BENCH, Bench("gpu_loops", loops)], ids=lambda bench: bench.name)
def test_points_without_gpus_stay_as_not_run_and_earlier_rows_are_kept(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "rows.csv"
    words = ["bench", "--output", str(target), "--points", "1GPU"]
    monkeypatch.setattr(sys, "argv", words)
    assert main(bench, "") == 0
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row["status"] == "not-run" for row in rows)
    assert f'needs 1 GPU; python tools/bench/{bench.name}.py --points "' in rows[0]["note"]
    target.write_text(target.read_text().replace("not-run", "ok", 1))
    monkeypatch.setattr(sys, "argv", [*words, "--again"])
    assert main(bench, "") == 0
    assert ",ok," in target.read_text()
