"""The benchmark of pipelines: its numbers for stages of known times."""

from __future__ import annotations

import argparse

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


def test_balance_is_one_for_equal_stages() -> None:
    assert pipeline.balance([2.0, 2.0]) == 1.0
    assert pipeline.balance([1.0, 3.0]) == 1.5


def test_a_cut_is_compared_with_the_best_one() -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    options = {"example_inputs": torch.rand(2, 4), "verify": "off"}
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


def test_rows_of_sections_that_were_not_run_are_kept(tmp_path: object) -> None:
    path = tmp_path / "t.csv"  # type: ignore[operator]
    memory, bubbles = (
        pipeline.row("a", "peak memory measured", "B", None),
        pipeline.row("b", "bubble measured", "1", 0.5),
    )
    pipeline.write(path, [memory, bubbles])
    assert [line["point"] for line in pipeline.kept(pipeline.read(path), {"bubble"})] == ["a"]
    assert memory["status"] == "not-run" and bubbles["ours"] == "0.5"
    assert pipeline.row("c", "balance measured", "1", 1.3, ok=False)["status"] == "failed"


def test_memory_needs_gpus() -> None:
    options = argparse.Namespace(quick=True, only=["memory"], device="cpu")
    assert {found["status"] for _, found in pipeline.rows(options)} == {"not-run"}


def test_peaks_of_a_gpu_stay_in_a_run_without_one() -> None:
    options = argparse.Namespace(quick=True, only=["memory"], device="cpu")
    before = [
        pipeline.row(f"sew_resnet34 pp=2 zbv G=32 rank {rank}", "peak memory measured", "B", 7) for rank in (0, 1)
    ]
    found = [line for _, line in pipeline.rows(options, before)]
    assert [line for line in found if line["status"] != "not-run"] == before
