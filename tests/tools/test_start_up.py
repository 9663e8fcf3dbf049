"""Rows of the start-up benchmark, and what a process is told about caches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.bench import start_up
from tools.bench.rows import read
from tools.bench.vision_ours import age


def run(first: float, process: float) -> dict[str, float]:
    return {"compile_s": 1.0, "launch_s": 0.5, "first_step_s": first - 1.5, "first": first, "process": process}


def test_the_median_is_held_to_the_limit() -> None:
    runs = [run(9.0, 20.0), run(9.5, 21.0), run(30.0, 44.0)]
    first, process = start_up.rows_of("Net", "caches on disk", runs)
    assert (first["ours"], first["repeats"], first["status"]) == ("9.5", 3, "ok")
    assert first["note"] == "limit 10; compile 1.00, launch 0.50, first_step 8.00"
    assert (process["ours"], process["status"], process["note"]) == ("21", "ok", "")
    late, _ = start_up.rows_of("Net", "caches on disk", [run(10.5, 20.0)])
    assert late["status"] == "failed"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results, where a GPU is said to be there and two pairs are measured before it is gone."""
    pairs: Iterator[float] = iter((20.0, 30.0))
    monkeypatch.setattr(start_up, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(start_up, "gpus", lambda: "1 x a GPU")
    monkeypatch.setattr(start_up, "pair", lambda _: dict.fromkeys(start_up.LIMITS, run(next(pairs), 40.0)))
    return tmp_path


def test_a_run_that_is_cut_off_leaves_the_pairs_it_measured(results: Path) -> None:
    with pytest.raises(StopIteration):
        start_up.main(["--repeats", "3"])
    found = {(row["point"].partition(", ")[2], row["metric"]): row for row in read(results / "start_up.csv")}
    first = found["empty caches", "seconds to the first step"]
    assert len(found) == 4 and (first["ours"], first["repeats"]) == ("25", "2")


@pytest.mark.parametrize("other", [["--device", "cpu"], ["--size", "32"]])
def test_rows_of_another_device_or_size_stay_out_of_the_results(
    results: Path, other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start_up.main(["--repeats", "1", *other])
    assert not list(results.iterdir())
    assert "empty caches: seconds to the first step 20 s" in capsys.readouterr().out
    start_up.main(["--repeats", "1", *other, "--output", str(results / "mine.csv")])
    assert [path.name for path in results.iterdir()] == ["mine.csv"]


def test_every_cache_lies_in_the_folder(tmp_path: Path) -> None:
    given = start_up.environment(tmp_path)
    assert all(Path(given[name]).is_relative_to(tmp_path) for name in (*start_up.CACHES, "XDG_CACHE_HOME"))


def test_the_age_of_a_process_grows_with_the_clock() -> None:
    before = age()
    time.sleep(0.05)
    assert before > 0 and 0.04 < age() - before < 5
