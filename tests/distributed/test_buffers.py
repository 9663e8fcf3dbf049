"""The state of a program whose neurons keep theirs in registered buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same
from tests.neurons import data, fill
from tests.trace.test_window_buffers import Net


@pytest.mark.parametrize("topology", [{"dp": 2}, {"dp": 1, "tp": 2, "microbatches": 2}], ids=["dp", "tp"])
def test_a_window_is_neither_saved_nor_loaded(pool: Pool, topology: dict[str, Any]) -> None:
    module, other = fill(Net(True)), fill(Net(True), k=0.5)
    for part in data(4 * topology["dp"], 4)[:4].tensor_split(topology.get("microbatches", 1)):  # dp rank 0's
        module(part)
    other(data(7, 4))
    for net in (module, other):
        net.neuron.reset()  # type: ignore[operator, union-attr]
    for stepped, loaded in pool.run("tests.distributed.jobs_buffers:state_after_a_step", ranks=2, **topology):
        assert_same(stepped, module.state_dict())
        assert_same(loaded, other.state_dict(), 0)
    assert torch.equal(stepped["neuron.v"], torch.zeros(1, dtype=torch.float64))
