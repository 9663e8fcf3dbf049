"""The benchmark of pipelines: its numbers for stages of known times."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snnpart import facts, parallelize, schedules
from snnpart.facts import Value
from snnpart.ops import Surrogate
from tools.bench import pipeline
from tools.bench.pipeline_nets import CHAIN
from tools.bench.pipeline_ranks import RankTimes, bubble
from tools.bench.rows import RESULTS, Row


def test_balance_is_one_for_equal_stages() -> None:
    assert pipeline.balance([2.0, 2.0]) == 1.0
    assert pipeline.balance([1.0, 3.0]) == 1.5


def test_a_cut_is_compared_with_the_best_one() -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    options: dict[str, Any] = {"example_inputs": torch.rand(2, 4), "verify": "off"}
    compiled = parallelize(net, pp=2, split_at=["1"], **options).compiled
    keys = [[f"{i}.weight"] for i in range(4)]
    assert pipeline.above_best(compiled, np.array([1.0, 1.0, 1.0, 1.0]), keys) == 1.5
    assert pipeline.above_best(compiled, np.array([3.0, 1.0, 1.0, 1.0]), keys) == 1.0


def test_bubbles_are_the_time_in_which_ranks_do_not_compute() -> None:
    first = RankTimes([6.0, 8.0], [0.0, 20.0], [9.0, 30.0], 0, 0)
    second = RankTimes([6.0, 4.0], [1.0, 22.0], [10.0, 28.0], 0, 0)
    assert bubble([first, second]) == pytest.approx([1 - 12 / 20, 1 - 12 / 20])


@pytest.mark.parametrize("schedule", schedules.NAMES)
@pytest.mark.parametrize("pp", [2, 4])
def test_the_chain_is_cut_into_equal_stages(pp: int, schedule: str) -> None:
    job = pipeline.chain_job(pp, schedule)
    compiled = parallelize(CHAIN.make(), example_inputs=CHAIN.batch()[0], **job.options()).compiled
    graphs = [compiled.stage(stage, 0).graph for stage in range(compiled.plan.stage_count)]
    waits = [sum(isinstance(node.target, Surrogate) for node in graph.nodes) for graph in graphs]
    assert waits == [2 * 8 // len(graphs)] * len(graphs)
    assert all(facts.need(node, Value).requires_grad for g in graphs for node in g.nodes if node.target is F.linear)


def test_a_row_that_is_not_made_is_not_run_and_one_beyond_its_limit_has_failed() -> None:
    assert pipeline.row("a", "peak memory measured", "B", None)["status"] == "not-run"
    assert pipeline.row("b", "bubble measured", "1", 0.5)["ours"] == "0.5"
    assert pipeline.row("c", "balance measured", "1", 1.3, ok=False)["status"] == "failed"


def test_memory_needs_gpus() -> None:
    options = argparse.Namespace(quick=True, only=["memory"], device="cpu")
    assert {found["status"] for found in pipeline.rows(options)} == {"not-run"}


def peaks(ok: bool = True) -> list[Row]:
    """What a GPU gave for one schedule."""
    points = [f"sew_resnet34 pp=2 zbv G=32 rank {rank}" for rank in (0, 1)]
    return [pipeline.row(point, "peak memory measured", "B", 7, ok=ok) for point in points]


@pytest.mark.parametrize("ok", [True, False])
def test_peaks_of_a_gpu_stay_in_a_run_without_one_which_they_do_not_fail(tmp_path: Path, ok: bool) -> None:
    path = tmp_path / "t.csv"
    bubbles = pipeline.row("chain pp=2 zbv", "bubble measured", "1", 0.5)
    pipeline.write(path, [bubbles, *peaks(ok)])
    before = pipeline.read(path)
    for _ in range(2):
        assert pipeline.main(["--quick", "--only", "memory", "--output", str(path)]) == 0
        after = pipeline.read(path)
        assert [line for line in after if line["status"] != "not-run"] == before
        missing = [line["point"] for line in after if line["status"] == "not-run"]
        names = ("gpipe G=32", "gpipe fused G=32", "zbv fused G=32")
        assert missing == [f"sew_resnet34 pp=2 {name} rank {rank}" for name in names for rank in (0, 1)]


def test_a_run_that_is_cut_off_keeps_what_it_did_not_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    old = [pipeline.row(f"chain pp=2 {name}", "bubble measured", "1", 0.5) for name in ("gpipe", "zbv")]
    pipeline.write(path, old)

    def cut_off(*_: object) -> Iterator[Row]:
        yield pipeline.row("chain pp=2 gpipe", "bubble measured", "1", 0.25)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "rows", cut_off)
    with pytest.raises(KeyboardInterrupt):
        pipeline.main(["--quick", "--output", str(path)])
    assert {line["point"]: line["ours"] for line in pipeline.read(path)} == {
        "chain pp=2 gpipe": "0.25",
        "chain pp=2 zbv": "0.5",
    }


def test_a_row_that_failed_now_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "rows", lambda *_: iter(peaks(ok=False)))
    assert pipeline.main(["--quick", "--output", str(tmp_path / "t.csv")]) == 1


def test_the_docs_name_the_peaks_beyond_the_limit() -> None:
    found = [line for line in pipeline.read(RESULTS / "pipeline.csv") if line["metric"] == "peak memory measured"]
    failed = [line["note"].partition("%")[0] for line in found if line["status"] == "failed"]
    text = (RESULTS.parent / "pipeline.md").read_text(encoding="utf-8").replace("\n", " ")
    said = re.search(r"Measured peaks .*? \(\[results\].*?(?=  )", text)
    assert said is not None and found
    assert re.findall(r"(\d+\.\d) % less", said[0]) == [off[1:] for off in failed if off.startswith("-")]
    assert re.findall(r"(\d+\.\d) % more", said[0]) == [off[1:] for off in failed if off.startswith("+")]
    assert ("not measured" in said[0]) is any(line["status"] == "not-run" for line in found)
