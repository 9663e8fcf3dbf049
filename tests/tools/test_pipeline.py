"""The benchmark of pipelines: its numbers for stages of known times."""

from __future__ import annotations

import pytest

from tools.bench.pipeline import balance, bubbles


def test_balance_is_one_for_equal_stages() -> None:
    assert balance([2.0, 2.0]) == 1.0
    assert balance([1.0, 3.0]) == 1.5


def test_bubbles_of_equal_stages_are_the_known_ones() -> None:
    found = bubbles([1.0, 1.0, 1.0, 1.0], 4)
    assert found["gpipe"] == pytest.approx(3 / 11)
    assert found["zbv, equal stages"] < found["interleaved-1f1b, equal stages"] < found["1f1b"]
