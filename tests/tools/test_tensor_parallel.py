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
