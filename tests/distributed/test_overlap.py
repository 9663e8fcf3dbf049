"""Gradients are reduced once a step, while the last backward of the step runs, under every pipeline that allows it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed.pool import Pool

JOB = "tests.distributed.jobs_overlap:reductions"
WHOLE = [
    (2, {}, 1),
    (2, {"microbatches": 3}, 3),
    (4, {"pp": 2, "microbatches": 3}, 3),
    (4, {"pp": 2, "microbatches": 2, "schedule": "gpipe"}, 2),
]


@pytest.mark.parametrize("execution", ["eager", "cuda_graph"])
@pytest.mark.parametrize(("ranks", "how", "backwards"), WHOLE, ids=str)
def test_once_a_step_inside_the_last_backward(
    pool: Pool, ranks: int, how: dict[str, Any], backwards: int, execution: str
) -> None:
    for log in pool.run(JOB, ranks=ranks, name="leaves", execution=execution, **{"microbatches": 1, **how}):
        assert log == ["backward", "end"] * (backwards - 1) + ["last backward", "reduce", "end"]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_with_several_stages_a_rank_once_a_step(pool: Pool, schedule: str) -> None:
    """No backward of theirs reaches all parameters: buckets start when the last one has ended."""
    how = {"pp": 2, "microbatches": 2, "schedule": schedule, "execution": "cuda_graph"}
    for log in pool.run(JOB, ranks=4, name="wide", **how):
        assert log.count("reduce") == 1
        assert log.index("reduce") > max(i for i, entry in enumerate(log) if entry.endswith("backward"))


@pytest.mark.parametrize("execution", ["eager", "cuda_graph"])
@pytest.mark.parametrize("first", ["column", "replicate"])
def test_over_tp_gradients_of_weights_are_computed_while_those_of_inputs_are_summed(
    pool: Pool, first: str, execution: str
) -> None:
    """What the second layer reads was gathered, or is whole on every rank."""
    shard = {"first": first, "second": "column", "head": "replicate"}
    job = "tests.distributed.jobs_overlap:sums_of_gradients"
    for log in pool.run(job, ranks=2, execution=execution, shard=shard):
        text = "".join(f"{entry} " for entry in log)
        assert "sum weight wait" in text
        assert re.sub(r"sum (weight )*wait ", "", text) == ""
