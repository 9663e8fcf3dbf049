"""neuron_dtype=: on every topology the same rounding of membranes as on one rank, whatever the dtype of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.jobs_rounding import BATCH, stepped
from tests.distributed.pool import Pool

TOPOLOGIES: list[dict[str, Any]] = [
    {"ranks": 2},
    {"ranks": 2, "dp": "fsdp2"},
    {"ranks": 2, "tp": 2},
    {"ranks": 2, "pp": 2, "microbatches": 2},
    {"ranks": 4, "tp": 2, "pp": 2, "microbatches": 2},
]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {dtype: stepped(dtype) for dtype in ("fp32", "bf16", "fp16")}


def test_rounding_changes_the_step(alone: dict[str, Any]) -> None:
    """bf16 more than fp16; all layers fire and have gradients, and none is left out."""
    exact = alone["fp32"]
    moved = {
        dtype: max(float((alone[dtype][1][name] - grad).abs().max()) for name, grad in exact[1].items())
        for dtype in ("bf16", "fp16")
    }
    assert moved["bf16"] > moved["fp16"] > 1e-6
    for _, gradients, outputs, notices in alone.values():
        assert 0.01 < float(outputs.mean()) < 0.99
        assert all(float(grad.abs().max()) > 0 for grad in gradients.values())
        assert notices == []


@pytest.mark.parametrize(
    ("dtype", "topology"), [*(("bf16", topology) for topology in TOPOLOGIES), ("fp16", TOPOLOGIES[0])], ids=str
)
def test_it_is_the_step_of_one_rank(pool: Pool, alone: dict[str, Any], dtype: str, topology: dict[str, Any]) -> None:
    loss, gradients, outputs, _ = alone[dtype]
    found = pool.run("tests.distributed.jobs_rounding:stepped", neuron_dtype=dtype, **topology)
    dp = topology["ranks"] // (topology.get("tp", 1) * topology.get("pp", 1))
    made = found[0][2] if dp == 1 else torch.cat([rank[2] for rank in found], 1)
    assert made.shape[1] == BATCH
    torch.testing.assert_close(made, outputs, rtol=1e-9, atol=1e-9)
    for got, got_gradients, _, _ in found:
        assert got == pytest.approx(loss, rel=1e-9)
        for name, grad in gradients.items():
            torch.testing.assert_close(got_gradients[name], grad, rtol=1e-9, atol=1e-9, msg=name)
