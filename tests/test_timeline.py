"""The grid of a schedule, and bubble shares that are known in closed form."""

from __future__ import annotations

import pytest

from snnpart import schedules
from snnpart.orders import make_schedule
from snnpart.timeline import in_ticks, timeline


def test_grid() -> None:
    found = in_ticks(make_schedule("gpipe", 2, 2)).grid()
    assert found == (
        "rank 0 | 0F0 0F1             0B0 --- 0B1 ---",
        "rank 1 |     1F0 1F1 1B0 --- 1B1 ---",
    )


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_bubble_of_gpipe_and_1f1b(pp: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1), a well-known number."""
    for name in ("gpipe", "1f1b"):
        bubble = in_ticks(make_schedule(name, pp, microbatches)).bubble
        assert bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))


def test_interleaving_and_zero_bubble_wait_less() -> None:
    share = {n: in_ticks(make_schedule(n, 4, 8, schedules.stages_per_rank(n, 4, 0))).bubble for n in schedules.NAMES}
    assert share["1f1b"] > share["interleaved-1f1b"] > share["zbv"]
    assert share["1f1b"] > share["interleaved-zb"]


def test_a_slow_stage_makes_the_others_wait() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    even = timeline(schedule, lambda action: 1.0)
    slow = timeline(schedule, lambda action: 1.0 + action.stage)
    assert slow.bubble > even.bubble and slow.end == pytest.approx(18.0)


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_every_valid_count_runs_to_its_end(name: str, pp: int, microbatches: int) -> None:
    if not schedules.takes(name, pp, microbatches):
        return
    per_rank = schedules.stages_per_rank(name, pp, 0)
    schedule = make_schedule(name, pp, microbatches, per_rank)
    spans = in_ticks(schedule).spans
    assert sum(len(found) for found in spans.values()) == sum(map(len, schedule.values()))
