"""What a schedule takes, and how one that cannot be had is refused."""

from __future__ import annotations

import pytest

from snnpart import schedules
from snnpart.errors import ConfigError, PlanError
from snnpart.orders import in_flight, make_schedule
from snnpart.plan import Plan


def test_where_stages_lie() -> None:
    loop = Plan(pp=2, schedule="interleaved-1f1b", stages_per_rank=3)
    assert loop.stage_count == 6 and loop.stages_of(0) == (0, 2, 4)
    v = Plan(pp=3, schedule="zbv")
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert v.rank_of(5) == 0


def test_numbers_of_stages_a_rank() -> None:
    with pytest.raises(ConfigError, match=r"'zbv' runs 2 stage\(s\) a rank, not 3") as error:
        Plan(pp=2, schedule="zbv", stages_per_rank=3)
    assert "interleaved-1f1b" in error.value.fix
    with pytest.raises(ConfigError, match="one rank runs one stage"):
        Plan(schedule="interleaved-1f1b", stages_per_rank=2)
    assert Plan(schedule="zbv").stage_count == 1
    assert Plan(pp=2, schedule="interleaved-zb", stages_per_rank=1).stage_count == 2


def test_counts_of_microbatches() -> None:
    assert [m for m in range(1, 9) if schedules.takes("interleaved-1f1b", 2, m)] == [1, 2, 3, 4, 6, 8]
    assert schedules.nearest("interleaved-1f1b", 2, 5) == 6
    assert schedules.nearest("interleaved-1f1b", 3, 7) == 8
    assert schedules.nearest("1f1b", 4, 5) == 5
    with pytest.raises(PlanError, match="in 2 rounds of the same size, which 5 do not make") as error:
        make_schedule("interleaved-1f1b", 2, 5, 2)
    assert "microbatches=6" in error.value.fix
    assert error.value.choices == ("gpipe", "1f1b", "zbv")


def test_halves_hold_a_microbatch_until_the_weights_are_done() -> None:
    schedule = make_schedule("zbv", 2, 4, 2)
    assert {action.kind for action in schedule[0]} == {"F", "I", "W"}
    assert in_flight(schedule[0]) == 4  # 2 pp, of the two stages together
    assert in_flight(schedule[0], stage=3) == 1
