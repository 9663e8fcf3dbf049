"""Captured steps over ranks, with a stand-in for CUDA graphs over gloo: replays, failures, checkpoints between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.jobs_captures import STEPS
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same

JOBS = "tests.distributed.jobs_captures:"
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ddp2": {"ranks": 2},
    "fsdp2": {"ranks": 2, "dp": "fsdp2"},
    "tp2": {"ranks": 2, "tp": 2},
    "pp2": {"ranks": 2, "pp": 2, "microbatches": 2},
    "tp2-pp2": {"ranks": 4, "tp": 2, "pp": 2, "microbatches": 2},
}


def long(*values: Any) -> list[Any]:
    """For the long matrix."""
    return [pytest.param(value, marks=pytest.mark.all) for value in values]


def check_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert len(set(want["losses"])) == len(want["losses"])
    assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
    assert got["norm"] == pytest.approx(want["norm"], abs=1e-9) and want["norm"] > 0
    assert_same({"out": got["outputs"]}, {"out": want["outputs"]})
    assert_same(got["gradients"], want["gradients"])
    assert_same(got["state"], want["state"])


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", *long("adagrad")])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_what_is_replayed_is_what_eager_steps_do(pool: Pool, name: str, optimizer: str) -> None:
    eager = pool.run(JOBS + "captured", execution="eager", optimizer=optimizer, **TOPOLOGIES[name])
    static = pool.run(JOBS + "captured", execution="cuda_graph", fails=-1, optimizer=optimizer, **TOPOLOGIES[name])
    for want, got in zip(eager, static, strict=True):
        assert got["replays"] == [STEPS - 3, 3]
        check_equal(got, want)


@pytest.mark.parametrize("optimizer", ["sgd", *long("rmsprop")])
@pytest.mark.parametrize("name", ["fsdp2", "pp2", *long("ddp2", "tp2", "tp2-pp2")])
def test_what_cycles_is_stepped_behind_the_replay(pool: Pool, name: str, optimizer: str) -> None:
    """Momentum has another value in each step: two kinds of steps, then one with the optimizer's step outside."""
    how = {"optimizer": optimizer, "cycles": True, **TOPOLOGIES[name]}
    eager = pool.run(JOBS + "captured", execution="eager", **how)
    static = pool.run(JOBS + "captured", execution="cuda_graph", fails=-1, **how)
    for want, got in zip(eager, static, strict=True):
        assert got["replays"] == [0, 0, STEPS - 5, 3]
        assert len([notice for notice in got["notices"] if "'momentum' of" in notice]) == 1
        check_equal(got, want)


@pytest.mark.parametrize("rank", [1, *long(0)])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_capture_that_fails_on_one_rank_is_given_up_on_all(pool: Pool, name: str, rank: int) -> None:
    """With one notice, the same on all ranks; nothing of what was captured elsewhere is left."""
    eager = pool.run(JOBS + "captured", execution="eager", **TOPOLOGIES[name])
    static = pool.run(JOBS + "captured", execution="cuda_graph", fails=rank, **TOPOLOGIES[name])
    for want, got in zip(eager, static, strict=True):
        assert got["replays"] == [0, 0]
        (said,) = [notice for notice in got["notices"] if "steps run uncaptured: " in notice]
        assert said.endswith(
            f"the capture failed on rank {rank} with RuntimeError: this operation waits for the device"
        )
        check_equal(got, want)


@pytest.mark.parametrize("name", ["fsdp2", *long("tp2", "pp2-1f1b", "ddp2")])
def test_a_checkpoint_in_the_middle_of_captured_steps(pool: Pool, tmp_path: Path, name: str) -> None:
    """Training goes on in the same program, and from the file in one whose steps were captured before it was loaded."""
    for found in pool.run(JOBS + "checkpointed", ranks=2, name=name, directory=str(tmp_path)):
        want = found.pop("eager")
        assert len(set(want["losses"])) == len(want["losses"])
        assert sorted(found) == ["resumed", "saved"]
        for got in found.values():
            assert got["captured"] >= 1
            assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
            assert_same(got["state"], want["state"])


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", *long("sgd", "adagrad")])
@pytest.mark.parametrize(
    "how",
    [
        {"tp": 2},
        {"dp": "fsdp2"},
        {"dp": "fsdp2", "fsdp_units": 3, "fsdp_reshard": True},
        *long({"pp": 2, "microbatches": 2}, {"tp": 2, "dp": "fsdp2"}),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_one_on_all(pool: Pool, how: dict[str, Any], optimizer: str) -> None:
    """Also where the others' parts of every gradient are finite: slices over tp, shards over dp, stages."""
    for execution in ("eager", "cuda_graph"):
        ranks = 4 if {"tp", "dp"} <= how.keys() else 2
        found = pool.run(JOBS + "overflow_of_one", ranks=ranks, execution=execution, optimizer=optimizer, **how)
        assert [one.pop("finite") for one in found] == [rank != 1 for rank in range(ranks)]
        assert found == [{"unchanged": True, "scale": 2.0**9, "changed": True}] * ranks
