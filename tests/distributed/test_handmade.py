"""The runtime alone, on a network lowered by hand: every topology equals one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.handmade import make_net
from tests.distributed.jobs import batch
from tests.distributed.pool import Pool
from tests.distributed.reference import OneProcess, assert_same

TOPOLOGIES: list[tuple[int, dict[str, Any]]] = [
    (1, {"microbatches": 2}),
    (2, {"dp": "ddp", "microbatches": 2}),
    (2, {"dp": "fsdp2", "microbatches": 2}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "microbatches": 3, "schedule": "gpipe"}),
    (4, {"tp": 2, "pp": 2, "microbatches": 3}),
    (4, {"pp": 2, "microbatches": 2, "dp": "ddp"}),
    (4, {"pp": 2, "microbatches": 3, "dp": "fsdp2"}),
    (4, {"tp": 2, "dp": "ddp"}),
    (4, {"tp": 2, "dp": "fsdp2", "microbatches": 2}),
]


@pytest.mark.parametrize(
    ("ranks", "how"),
    TOPOLOGIES,
    ids=lambda v: "-".join(f"{k}{x}" for k, x in v.items()) if isinstance(v, dict) else str(v),
)
def test_training_equals_one_process(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """Losses, gradients, state after three steps (one with unequal dp batches) and outputs, on every rank."""
    dp = ranks // (how.get("tp", 1) * how.get("pp", 1))
    sizes = [[8] * dp, [7] * dp, [9 - 2 * r for r in range(dp)]]
    results = pool.run("tests.distributed.jobs:train_handmade", ranks=ranks, sizes=sizes, clip=0.5, **how)
    one = OneProcess(
        make_net(),
        microbatches=how.get("microbatches", 1),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        clip=0.5,
    )
    losses, grads = [], {}
    for step, per_rank in enumerate(sizes):
        x, y = batch(step, sum(per_rank))
        losses.append(one.train_step(list(zip(x.split(per_rank), y.split(per_rank), strict=True)), F.cross_entropy))
        grads = grads or one.gradients()
    x, y = batch(99, 5)
    outputs = one.evaluate(x)
    for result in results:
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(losses), rtol=0, atol=1e-9)
        assert_same(result["gradients"], grads)
        assert_same(result["state"], one.model.state_dict())
        torch.testing.assert_close(result["outputs"], outputs, rtol=0, atol=1e-9)
        assert result["eval"] == pytest.approx(F.cross_entropy(outputs, y).item(), abs=1e-9)
        assert result["losses"] == results[0]["losses"]
