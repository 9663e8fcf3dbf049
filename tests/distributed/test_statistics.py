"""BatchNorm over all data-parallel ranks: what one process computes of the whole batch, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.jobs_statistics import one_process
from tests.distributed.pool import Pool

JOB = "tests.distributed.jobs_statistics:synchronised"
TOPOLOGIES = ({"ranks": 2}, {"ranks": 2, "fuse": True}, {"ranks": 4, "tp": 2}, {"ranks": 3, "dp": "fsdp2"})
CASES = ("a07", "a07 n == c", "a08", "spiking")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_it_equals_one_process_with_the_whole_batch(pool: Pool, name: str, topology: dict[str, Any]) -> None:
    """Loss, gradients, running statistics and counter, on 2 and 3 dp ranks (uneven for 7 samples), with tp besides."""
    loss, grads, buffers = one_process(name)
    for got, got_grads, got_buffers in pool.run(JOB, name=name, **topology):
        assert got == pytest.approx(loss, rel=1e-9)
        assert set(got_grads) == set(grads)
        for key, grad in grads.items():
            torch.testing.assert_close(got_grads[key], grad, rtol=1e-9, atol=1e-11)
        for key, buffer in buffers.items():
            torch.testing.assert_close(got_buffers[key], buffer, rtol=1e-9, atol=1e-12)


def test_a07_and_a08_numbers(pool: Pool) -> None:
    """The values that the cases state: one update of A07's averages, three of A08's, on two ranks."""
    _, _, buffers = pool.run(JOB, ranks=2, name="a07")[0]
    variance = torch.tensor([1.1018104658425711, 1.1015091879250873, 1.1014679079293779], dtype=torch.float64)
    torch.testing.assert_close(buffers["bn.running_var"], variance, rtol=1e-9, atol=0)
    assert int(buffers["bn.num_batches_tracked"]) == 1
    _, _, buffers = pool.run(JOB, ranks=2, name="a08")[0]
    mean = torch.tensor([-0.003812565, -0.004881319, 0.00292737, 0.005412178], dtype=torch.float64)
    torch.testing.assert_close(buffers["bn.running_mean"], mean, rtol=0, atol=1e-8)
    assert int(buffers["bn.num_batches_tracked"]) == 3
