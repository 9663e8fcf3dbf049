"""What the ranks do in the test of profiles."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from snnpart.profile import profile
from tests.nets import Net


def profiled(folder: str, **options: object) -> str:
    torch.manual_seed(0)
    inputs = (torch.rand(4, 3, 8, 8),)
    return profile(Net(), inputs, {"input_layout": "NCHW", **options}, trace=Path(folder, "step.json"))


def uneven() -> str:
    """Of two stages the second has the head alone."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3 if not i else 32, 32, 3, padding=1) for i in range(6)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    options = {"input_layout": "NCHW", "pp": 2, "microbatches": 2, "split_at": ["8"]}
    return profile(model, (torch.rand(8, 3, 32, 32),), options)
