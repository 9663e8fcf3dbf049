"""What every test shares: one thread, the same random numbers in every run, and the default dtype put back."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed torch, and undo what a test may have changed globally."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
