"""tools/bench/tensor_parallel.py: the short form, and what it counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench.rows import COLUMNS, read

pytest.importorskip("spikingjelly.activation_based.distributed")
SCRIPT = Path(__file__).parents[2] / "tools/bench/tensor_parallel.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_tensor_parallel", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.all
def test_both_sides_are_counted(bench: Any) -> None:
    """On images this small the class scores, which both send, weigh most; the full size meets the goals."""
    (point, tp), *_ = bench.points(quick=True)
    inference, training = (bench.measure(point, tp, mode) for mode in ("inference", "training"))
    assert set(inference) == set(COLUMNS)
    assert float(inference["ratio"]) > 7 and "all_gather" in inference["note"]
    assert float(training["ratio"]) > 1 / 0.6 and training["status"] == "ok"


def test_a_point_is_right_when_three_plans_and_more_were_there_to_choose_from(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"whole": (3.0, 3.0), "max": (1.0, 1.01), "half": (2.0, 1.0)}

    def measured(names: list[str]) -> list[dict[str, Any]]:
        plans = {name: {"predicted": times[name][0], "measured": times[name][1], "spread": 0.0} for name in names}
        return [{"point": f"{len(names)} plans", "repeats": 5, "plans": plans}]

    points = iter([measured(["whole", "max", "half"]), measured(["whole", "max"])])
    monkeypatch.setattr(bench, "NETS", ["one", "two"])
    monkeypatch.setattr(bench, "on_ranks", lambda *_: next(points))
    rows = list(bench.prediction_rows("cpu"))
    verdicts = {row["point"]: row["status"] for row in rows if row["metric"] == bench.BEHIND}
    assert verdicts == {"3 plans": "ok", "2 plans": "failed"}
    (total,) = (row for row in rows if row["metric"] == bench.HITS)
    assert total["ours"] == 1 and total["status"] == "failed"


RACE = {"point": "net, batch 2", "training": True, "batch": 2, "repeats": 3}
SIDES = {side: {"seconds": 0.5, "spread": 0.0, "collectives": 4} for side in ("peer", "max", "time")}


def test_the_short_form_runs_each_part_that_has_one(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "on_ranks", lambda script, given: [RACE | {"sides": SIDES}])
    monkeypatch.setattr(bench, "measure", lambda point, tp, mode: bench.row(mode, bench.BYTES_SENT, "MB", 1.0))
    for parts, wanted in (([], {"MB"}), (["speed"], {"images/s"}), (["speed", "bytes"], {"MB", "images/s"})):
        rows = bench.quick_rows(parts or ["bytes"], "cpu")
        assert {row["unit"] for row in rows} == wanted
        assert bench.main(["--quick", *(["--parts", *parts] if parts else [])]) == 0
        said = capsys.readouterr().out
        assert {unit for unit in ("MB", "images/s") if f" {unit} " in said} == wanted
    with pytest.raises(SystemExit):
        bench.main(["--quick", "--parts", "bytes", "prediction", "placement"])
    assert "--quick has the parts bytes and speed, not placement, prediction" in capsys.readouterr().err


def unasked(*_: Any, **__: Any) -> Any:
    raise AssertionError("ranks were started")


@pytest.mark.parametrize("gpus", [0, 1])
def test_what_needs_two_gpus_is_not_run_on_fewer(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int
) -> None:
    """Earlier rows stay, those of two GPUs too; only what was never measured is said to be missing."""
    path = tmp_path / "t.csv"
    label = bench.speed_point(bench.TIMED["cuda"][0].label, "2 GPUs", False, "max")
    rows = [
        bench.row(label, bench.SPEED, "images/s", 7.0, peer=5.0, machine="2 x a GPU"),
        bench.row("12 points, tp=2", bench.HITS, "points", 11, machine="x86_64, 2 processes"),
    ]
    bench.merge(path, rows, [])
    before = read(path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(bench, "on_ranks", unasked)
    for _ in range(2):
        assert bench.main(["--parts", "speed", "prediction", "--device", "cuda", "--output", str(path)]) == 0
        after = read(path)
        assert [row for row in after if row["status"] != "not-run"] == before
        missing = {(row["point"], row["metric"]): row["note"] for row in after if row["status"] == "not-run"}
        assert len(missing) == 2 * len(bench.TIMED["cuda"])  # one race was measured; the predictions are one row
        assert all(point.endswith("2 GPUs") for point, _ in missing)
        assert missing["12 points, tp=2, 2 GPUs", bench.HITS].endswith("--parts prediction --device cuda")


def test_predictions_on_gpus_leave_those_of_processes(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans = {name: {"predicted": 1e3, "measured": 1e3, "spread": 0.0} for name in ("whole", "max", "half")}
    monkeypatch.setattr(bench, "on_ranks", lambda script, given: [{"point": given[0], "repeats": 5, "plans": plans}])
    monkeypatch.setattr(bench, "gpus", lambda: "2 x a GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    path = tmp_path / "t.csv"
    for device in ("cpu", "cuda", "cpu"):
        assert bench.main(["--parts", "prediction", "--device", device, "--output", str(path)]) == 0
    rows = [row for row in read(path) if row["status"] != "not-run" and row["metric"] == bench.PLAN_TIMES]
    assert len(rows) == 2 * len(plans) * len(bench.NETS)
    assert {row["machine"] for row in rows if ", 2 GPUs" in row["point"]} == {"2 x a GPU"}
    assert {row["point"].replace(", 2 GPUs", "") for row in rows} == {f"{n}, {p}" for n in bench.NETS for p in plans}
