"""Static steps, run uncaptured on gloo, are eager steps: same losses, state, outputs, whatever the topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same

JOBS = "tests.distributed.jobs_execution:"
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ddp2": {"ranks": 2},
    "fsdp2": {"ranks": 2, "dp": "fsdp2"},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2-1f1b": {"ranks": 2, "pp": 2, "microbatches": 3},
    "pp2-gpipe": {"ranks": 2, "pp": 2, "microbatches": 2, "schedule": "gpipe"},
    "dp2-pp2": {"ranks": 4, "pp": 2, "microbatches": 2},
    "tp2-pp2": {"ranks": 4, "tp": 2, "pp": 2, "microbatches": 2},
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_static_steps_are_eager_steps(pool: Pool, name: str) -> None:
    eager, static = (
        pool.run(JOBS + "train", execution=e, clip=0.1, **TOPOLOGIES[name]) for e in ("eager", "cuda_graph")
    )
    for want, got in zip(eager, static, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert got["norm"] == pytest.approx(want["norm"], abs=1e-9) and want["norm"] > 0.1
        assert_same(got["state"], want["state"])
        assert_same({"out": got["outputs"]}, {"out": want["outputs"]})
        assert "execution='cuda_graph' captures nothing on the CPU: its steps run uncaptured" in got["notices"]


@pytest.mark.parametrize(
    ("name", "execution"),
    [("ddp2", "auto"), *(pytest.param(name, "compile", marks=pytest.mark.all) for name in TOPOLOGIES)],
)
def test_other_modes_are_eager_steps(pool: Pool, name: str, execution: str) -> None:
    eager, other = (
        pool.run(JOBS + "train", execution=e, clip=0.1, timeout=240.0, **TOPOLOGIES[name]) for e in ("eager", execution)
    )
    for want, got in zip(eager, other, strict=True):
        assert want["compiled"] == 0 and (got["compiled"] > 0) == (execution == "compile")
        assert got["notices"] == []
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert got["norm"] == pytest.approx(want["norm"], abs=1e-9) and want["norm"] > 0.1
        assert_same(got["state"], want["state"])
        assert_same({"out": got["outputs"]}, {"out": want["outputs"]})


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "adagrad"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_every_kind_of_optimizer(pool: Pool, optimizer: str, clip: float | None) -> None:
    eager, static = (
        pool.run(JOBS + "train", ranks=2, execution=e, optimizer=optimizer, clip=clip) for e in ("eager", "cuda_graph")
    )
    for want, got in zip(eager, static, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert_same(got["state"], want["state"])


@pytest.mark.parametrize("name", ["leaves", "norms", "still"])
@pytest.mark.parametrize("how", [{"ranks": 2}, {"ranks": 2, "pp": 2, "microbatches": 2}, {"ranks": 2, "tp": 2}])
def test_traced_networks(pool: Pool, name: str, how: dict[str, Any]) -> None:
    eager, static = (pool.run(JOBS + "train_case", name=name, execution=e, **how) for e in ("eager", "cuda_graph"))
    for want, got in zip(eager, static, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert_same(got["gradients"], want["gradients"])
        assert_same(got["state"], want["state"])


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zb", "zbv"])
def test_several_stages_a_rank(pool: Pool, schedule: str) -> None:
    how = {"name": "wide", "pp": 2, "microbatches": 4, "schedule": schedule, "ranks": 4}
    eager, static = (pool.run(JOBS + "train_case", execution=e, **how) for e in ("eager", "cuda_graph"))
    for want, got in zip(eager, static, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert_same(got["state"], want["state"])


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("inputs", "ConfigError: the inputs of train step 2 hold NaN or Inf"),
        ("gradients", "LaunchError: the gradients of train step 2 hold NaN or Inf"),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
@pytest.mark.parametrize("how", [{}, {"dp": "fsdp2"}, {"tp": 2}, {"pp": 2, "microbatches": 2}], ids=str)
def test_a_bad_step_changes_nothing_and_is_said_on_all_ranks(
    pool: Pool, where: str, text: str, how: dict[str, Any], optimizer: str
) -> None:
    for found in pool.run(JOBS + "poisoned", ranks=2, where=where, optimizer=optimizer, **how):
        assert found["text"].startswith(text)
        assert found["unchanged"]
        assert found["after"] == found["after"]


@pytest.mark.parametrize("how", [{"ranks": 2}, {"ranks": 2, "pp": 2, "microbatches": 2}])
def test_targets_that_do_not_count(pool: Pool, how: dict[str, Any]) -> None:
    eager, static = (pool.run(JOBS + "ignored", execution=e, **how) for e in ("eager", "cuda_graph"))
    for want, got in zip(eager, static, strict=True):
        assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.all)])
@pytest.mark.parametrize("how", [{"tp": 2}, {"pp": 2, "microbatches": 2}, {"dp": "fsdp2"}])
def test_autocast_on_ranks(pool: Pool, precision: str, how: dict[str, Any]) -> None:
    """Eager and static steps are the same; what crosses the cut has the dtype that one process computes in."""
    eager, static = (
        pool.run(JOBS + "autocast", ranks=2, precision=precision, execution=e, **how) for e in ("eager", "cuda_graph")
    )
    for want, got in zip(eager, static, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert_same(got["state"], want["state"], 1e-5)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert got["dtype"] is (torch.float32 if "tp" in how else half)  # the bias is added to a sum over tp in float32
        assert (got["scale"] is None) == (precision == "bf16")


@pytest.mark.parametrize("how", [{}, {"pp": 2, "microbatches": 2}])
def test_an_overflow_anywhere_is_one_everywhere(pool: Pool, how: dict[str, Any]) -> None:
    for found in pool.run(JOBS + "overflow", ranks=2, **how):
        assert found == {"unchanged": True, "scale": 2.0**59, "changed": True}


@pytest.mark.parametrize("how", [{}, {"dp": "fsdp2"}, {"dp": "fsdp2", "fsdp_units": 3, "fsdp_reshard": True}], ids=str)
def test_weights_that_lie_with_channels_last(pool: Pool, how: dict[str, Any]) -> None:
    eager = pool.run(JOBS + "lying_otherwise", ranks=2, execution="eager")
    static = pool.run(JOBS + "lying_otherwise", ranks=2, execution="cuda_graph", **how)
    for want, got in zip(eager, static, strict=True):
        assert want["orders"] == got["orders"] == {True, False}
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert_same(got["state"], want["state"])
