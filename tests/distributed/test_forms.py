"""Inputs, outputs and boundaries of every form: keywords, int64, bool, values without a gradient, nested outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.distributed.jobs_forms import Seen, batch, loss_fn, made
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same, even
from tests.distributed.test_cases import assert_active, name_of


def one_process(dp: int, microbatches: int) -> dict[str, Any]:
    """Losses, last gradients, state, and the outputs of each dp rank's evaluation."""
    model = made()
    assert_active(model, lambda: model(**batch(0)[0]))
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), [], {}
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(step)
        sizes = [size for share in y.tensor_split(dp) for size in even(len(share), microbatches)]
        parts = zip(*(v.split(sizes) for v in x.values()), y.split(sizes), sizes, strict=True)
        total = 0.0
        for *given, target, size in parts:
            loss = loss_fn(model(**dict(zip(x, given, strict=True))), target) * (size / len(y))
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    assert len(gradients) == len(list(model.parameters())) and all(g.abs().max() > 0 for g in gradients.values())
    model.eval()
    shares = zip(*(v.tensor_split(dp) for v in batch(2)[0].values()), strict=True)
    outputs = [model(**dict(zip(batch(2)[0], share, strict=True))) for share in shares]
    return {"losses": losses, "gradients": gradients, "state": model.state_dict(), "outputs": outputs}


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {"pp": 2, "schedule": "gpipe", "microbatches": 3}),
        (2, {"pp": 2, "schedule": "zbv", "microbatches": 2}),
        pytest.param(3, {"pp": 3, "schedule": "1f1b", "microbatches": 4}, marks=pytest.mark.all),
        (4, {"pp": 4, "schedule": "1f1b", "microbatches": 5}),
        (4, {"pp": 2, "dp": "fsdp2", "schedule": "interleaved-1f1b", "microbatches": 2}),
        pytest.param(4, {"pp": 2, "dp": "ddp", "schedule": "interleaved-zb", "microbatches": 3}, marks=pytest.mark.all),
        (4, {"pp": 2, "tp": 2, "schedule": "interleaved-zb", "microbatches": 2}),
    ],
    ids=name_of,
)
def test_everything_arrives_as_it_was_sent(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    dp = ranks // (how["pp"] * how.get("tp", 1))
    wanted = one_process(dp, how["microbatches"])
    for result in pool.run("tests.distributed.jobs_forms:train", ranks=ranks, **how):
        assert {"torch.int64", "torch.bool", "torch.float64"} <= set(result["dtypes"])
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-9)
        assert_same(result["gradients"], wanted["gradients"])
        assert_same(result["state"], wanted["state"])
        found, right = result["outputs"], wanted["outputs"][result["dp"]]
        assert isinstance(found["seen"], Seen) and isinstance(found["above"], tuple)
        for a, b in zip(*map(pytree.tree_leaves, (found, right)), strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                assert a.dtype is b.dtype
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
