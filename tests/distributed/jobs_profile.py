"""What the ranks do in the test of profiles."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from snnpart.profile import profile
from snnpart.runtime.pipeline import Pipeline
from tests.nets import Net


def profiled(folder: str, **options: object) -> str:
    torch.manual_seed(0)
    inputs = (torch.rand(4, 3, 8, 8),)
    return profile(Net(), inputs, {"input_layout": "NCHW", **options}, trace=Path(folder, "step.json"))


def uneven() -> str:
    """Of two stages the second has the head alone, and the first is slow whatever else the machine does."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3 if not i else 32, 32, 3, padding=1) for i in range(6)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    options = {"input_layout": "NCHW", "pp": 2, "microbatches": 2, "split_at": ["8"]}
    plain = Pipeline._forward
    slow = dist.get_rank() == 0
    Pipeline._forward = lambda *given: (time.sleep(0.3 * slow), plain(*given))[1]  # type: ignore[method-assign]
    try:
        return profile(model, (torch.rand(8, 3, 32, 32),), options)
    finally:
        Pipeline._forward = plain  # type: ignore[method-assign]
