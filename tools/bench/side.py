"""What the scripts of one measurement share: the rate of their steps, and how they tell their runner.

The runner (`vision_rows.py`) reads the line `RESULT {json}` that rank 0 prints.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def rate(step: Callable[[int], Any], batch: int, steps: int) -> float:
    """Samples/s of this process over `steps` steps of `batch` samples; a step is given its number."""
    _synchronize()
    began = time.perf_counter()
    for number in range(steps):
        step(number)
    _synchronize()
    return batch * steps / (time.perf_counter() - began)


def _synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def tell(result: Mapping[str, Any]) -> None:
    """Rank 0 prints the result; without ranks this process does."""
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT " + json.dumps(result), flush=True)


def finish(result: Mapping[str, Any]) -> None:
    """Tell the result and end the process group that a launch left."""
    tell(result)
    if dist.is_initialized():
        dist.destroy_process_group()
