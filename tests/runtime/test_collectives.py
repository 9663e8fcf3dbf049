"""Which backend carries a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from snnpart.runtime.collectives import Axis, over_nccl

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
