"""What every test shares: one thread, the same random numbers in every run, and the default dtype put back.

`--shard i/n` runs the i-th of n equal parts of the tests that the other options select (i from 1): i, i + n, ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="i/n", help="the i-th of n equal parts of the tests (i from 1)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts."""
    part, _, parts = str(config.getoption("--shard")).partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--shard {part}/{parts}: give i/n with i from 1 to n")
    kept = items[int(part) - 1 :: int(parts)]
    left = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = kept


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed torch, and undo what a test may have changed globally."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
