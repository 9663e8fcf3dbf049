"""Comparisons of the batch size as data: worked out, never run."""

from __future__ import annotations

import pytest

from snnpart.errors import ConfigError
from snnpart.graph import BatchGuard
from snnpart.guards import compares


@pytest.mark.parametrize(
    ("text", "batch", "holds"),
    [
        ("N > 1", 1, False),
        ("N > 1", 2, True),
        ("((4 * N) + -2) % 4 == 2", 3, True),
        ("(N // 2) <= 0.5", 3, False),
        ("3 // (N - 1) == 3", 1, False),
        ("(-3) < N", 1, True),
    ],
)
def test_values(text: str, batch: int, holds: bool) -> None:
    assert compares(text, batch) is holds
    assert BatchGuard(text, holds).at(batch) and not BatchGuard(text, not holds).at(batch)


@pytest.mark.parametrize("text", ["print(1)", "M > 1", "N >", "N.real > 0", "0 < N < 3", "N ** 2 > 1", "'a' < 'b'"])
def test_what_is_no_comparison_of_the_batch_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is no comparison of the batch size N"):
        compares(text, 1)
