"""Static steps, run uncaptured on gloo, are eager steps: same losses, state, outputs, whatever the topology."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "adagrad"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_every_kind_of_optimizer(pool: Pool, optimizer: str, clip: float | None) -> None:
    eager, static = (
        pool.run(JOBS + "train", ranks=2, execution=e, optimizer=optimizer, clip=clip) for e in ("eager", "cuda_graph")
    )
    for want, got in zip(eager, static, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert_same(got["state"], want["state"])
