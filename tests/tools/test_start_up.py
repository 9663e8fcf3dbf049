"""Rows of the start-up benchmark, and what a process is told about caches."""

from __future__ import annotations

import time
from pathlib import Path

from tools.bench import start_up
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


def test_every_cache_lies_in_the_folder(tmp_path: Path) -> None:
    given = start_up.environment(tmp_path)
    assert all(Path(given[name]).is_relative_to(tmp_path) for name in (*start_up.CACHES, "XDG_CACHE_HOME"))


def test_the_age_of_a_process_grows_with_the_clock() -> None:
    before = age()
    time.sleep(0.05)
    assert before > 0 and 0.04 < age() - before < 5
