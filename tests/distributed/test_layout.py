"""Channels last over ranks: they agree on the order in which they send, whatever their own sizes look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.layout_nets import images, loss_fn, made
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same

COLUMNS = {"first": "column", "second": "column", "head": "replicate"}
BRANCHES = {"first": "column", "point": "column", "apart": "group", "full": "column", "depth": "group"}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("masked", 2, {"tp": 2, "shard": COLUMNS}),
    ("masked", 3, {"tp": 3, "shard": COLUMNS}),
    ("masked", 4, {"tp": 4, "shard": COLUMNS}),
    ("masked", 4, {"tp": 2, "pp": 2, "shard": COLUMNS, "microbatches": 2}),
    ("heads", 2, {"tp": 2, "shard": {"first": "column", "merged": "column", "point": "column"}}),
    ("heads", 3, {"tp": 3, "shard": {"first": "column", "merged": "column", "point": "column"}}),
    ("heads", 4, {"tp": 2, "pp": 2, "shard": {"merged": "column", "point": "column"}, "microbatches": 2}),
    ("branches", 2, {"tp": 2, "shard": BRANCHES}),
    ("grouped", 4, {"tp": 4}),
    ("grouped", 4, {"tp": 2, "dp": "fsdp2"}),
]


@pytest.mark.parametrize(("name", "ranks", "how"), CASES, ids=lambda v: str(v) if isinstance(v, str) else None)
def test_a_step_is_that_of_the_module(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """The comparisons at compile time and at launch are on; and so is the state what the module has."""
    module, x = made(name), images()
    outputs = module(x)
    loss = loss_fn(outputs, torch.zeros(len(x)))
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in module.named_parameters()}
    for found in pool.run("tests.distributed.jobs_layout:one_step", ranks=ranks, name=name, **how):
        assert found["loss"] == pytest.approx(loss.item(), abs=1e-12)
        assert_same(found["gradients"], gradients)
        assert_same(found["state"], module.state_dict())
        if found["outputs"] is not None:
            torch.testing.assert_close(found["outputs"], outputs.detach(), rtol=0, atol=1e-12)
