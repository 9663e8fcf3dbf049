"""Which backend carries a tensor, and copies of runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from snnpart.runtime.collectives import Axis, copy_runs, over_nccl

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("config", "gpu"),
    [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("nccl", True), ("cpu:gloo,cuda:gloo", False), ("gloo", False)],
)
def test_a_group_may_have_a_backend_for_each_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, config: str, gpu: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group: Any = object()
    assert over_nccl(Axis(group, 0, (0, 1)), GPU) is gpu
    assert not over_nccl(Axis(group, 0, (0, 1)), CPU)
    assert not over_nccl(Axis(None, 0, (0,)), GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64])
@pytest.mark.parametrize("size, inner", [(24, 1), (3, 1), (4, 49), (1, 2), (5, 8), (0, 4)])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_runs_are_copied_bit_by_bit_and_nothing_else_is_touched(
    dtype: torch.dtype, size: int, inner: int, offset: int
) -> None:
    """In numbers as wide as the place and the length of the runs allow: also what is no number stays as it is."""
    source = torch.zeros(7, size, inner, dtype=dtype)
    bits = source.view(torch.uint8).random_(0, 2 if dtype is torch.bool else 256)
    whole = torch.zeros(7, size + 9, inner, dtype=dtype)
    copy_runs(whole[:, offset : offset + size], source)
    assert whole[:, offset : offset + size].contiguous().view(torch.uint8).equal(bits)
    whole[:, offset : offset + size].zero_()
    assert not whole.view(torch.uint8).any()
