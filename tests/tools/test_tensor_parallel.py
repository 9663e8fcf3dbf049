"""tools/bench/tensor_parallel.py: the short form, and what it counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bench.rows import COLUMNS

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
