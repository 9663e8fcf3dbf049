"""What the ranks do in the test of profiles."""

from __future__ import annotations

from pathlib import Path

import torch

from snnpart.profile import profile
from tests.nets import Net


def profiled(folder: str, **options: object) -> str:
    torch.manual_seed(0)
    inputs = (torch.rand(4, 3, 8, 8),)
    return profile(Net(), inputs, {"input_layout": "NCHW", **options}, trace=Path(folder, "step.json"))
