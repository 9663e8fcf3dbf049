"""Every schedule on real process groups equals one process in float64: losses, gradients, buffers, outputs, updates."""

from __future__ import annotations

from typing import Any

import pytest

from snnpart import ops_pool, schedules
from snnpart.errors import LaunchError
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.pool import JobFailed, Pool
from tests.distributed.test_cases import check, name_of

SPLIT = ("interleaved-zb", "zbv")
MANY = ("interleaved-1f1b", *SPLIT)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [(name, m) for name in schedules.NAMES for m in (1, 2, 3, 4) if schedules.takes(name, 2, m)],
)
def test_skips_and_uneven_microbatches_on_two_ranks(pool: Pool, schedule: str, microbatches: int) -> None:
    """Five samples: with three microbatches 2 + 2 + 1. Interleaved schedules have four stages here."""
    check(pool, "A14", 2, {"pp": 2, "schedule": schedule, "microbatches": microbatches})


@pytest.mark.parametrize("schedule", MANY)
@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, {"pp": 2}), (4, {"pp": 2, "dp": "ddp"}), (4, {"pp": 2, "dp": "fsdp2"}), (4, {"pp": 2, "tp": 2})],
    ids=name_of,
)
def test_batch_norm_and_two_updates(pool: Pool, schedule: str, ranks: int, how: dict[str, Any]) -> None:
    check(pool, "norms", ranks, {**how, "schedule": schedule, "microbatches": 2}, learn=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_poolings_that_keep_codes(pool: Pool, schedule: str) -> None:
    """Also where backward comes in halves; the microbatches have two samples."""
    how = {"pp": 2, "schedule": schedule, "microbatches": 4, "channels_last": True}
    program = compile_case(CASES["narrow"], **how)
    targets = [node.target for stage in program.stages.values() for node in stage.graph.nodes]
    assert targets.count(ops_pool.max_pool2d) == 1
    check(pool, "narrow", 2, how, learn=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_spikes_cross_as_bits(pool: Pool, schedule: str) -> None:
    """Cut behind neurons: every boundary carries spikes, packed forward, gradients back in float64."""
    stages = 4 if schedule == "zbv" else 2
    split_at = {"gpipe": ["1"], "1f1b": ["2"], "zbv": ["1", "2", "3"]}[schedule]
    how = {"pp": 2, "schedule": schedule, "split_at": split_at, "microbatches": 3}
    program = compile_case(CASES["leaves"], **how)
    for stage in range(stages - 1):
        (port,) = program.stage(stage, 0).sends
        assert port.states == (0, 2) and port.value.requires_grad
        assert port.wire_bytes == 5  # 10 samples of 4 channels
    check(pool, "leaves", 2, how, learn=True)


def test_a_value_outside_its_domain_is_an_error(pool: Pool) -> None:
    """Taken for spikes, it would travel as other numbers."""
    with pytest.raises(JobFailed, match="travels as bits because it holds whole numbers 0 to 1 only") as failed:
        pool.run("tests.distributed.jobs_pipeline:claim_spikes", ranks=2)
    assert isinstance(failed.value.errors[0], LaunchError)


def test_other_shapes_leave_nothing_behind(pool: Pool) -> None:
    """Graphs of other shapes are made, kept and dropped: after the first round nothing grows, and close frees them."""
    for result in pool.run("tests.distributed.jobs_pipeline:many_shapes", ranks=2):
        first, second, third = result["alive"]
        assert result["compiled"] > 12  # every round makes them again
        assert third["groups"] == second["groups"] == first["groups"]
        for kind in ("tensors", "graphs", "stages"):
            assert third[kind] <= second[kind], (kind, result["alive"])
        assert result["closed"]["groups"] < third["groups"]
