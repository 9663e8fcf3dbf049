"""The order of actions is torch's, complete and free of deadlock for any counts."""

from __future__ import annotations

import pytest

from snnpart.errors import PlanError
from snnpart.passes.lower.schedule import in_flight, make_schedule


def test_one_f_one_b() -> None:
    schedule, notices = make_schedule("1f1b", 2, 3)
    assert " ".join(map(str, schedule[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, schedule[1])) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert notices == ()


def test_gpipe() -> None:
    schedule, _ = make_schedule("gpipe", 2, 2)
    assert " ".join(map(str, schedule[0])) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_each_microbatch_once_each_way(stages: int, microbatches: int) -> None:
    for name in ("gpipe", "1f1b"):
        schedule, _ = make_schedule(name, stages, microbatches)
        for stage, actions in schedule.items():
            expected = sorted(f"{stage}{kind}{m}" for kind in "FB" for m in range(microbatches))
            assert sorted(map(str, actions)) == expected


def test_one_f_one_b_holds_fewer_microbatches() -> None:
    assert in_flight(make_schedule("1f1b", 4, 8)[0][3]) == 1
    assert in_flight(make_schedule("1f1b", 4, 8)[0][0]) == 4
    assert in_flight(make_schedule("gpipe", 4, 8)[0][0]) == 8


def test_too_few_microbatches_say_so() -> None:
    schedule, (notice,) = make_schedule("1f1b", 3, 2)
    assert "needs at least 3 microbatches" in notice and len(schedule[0]) == 4
    with pytest.raises(PlanError, match="microbatches=0 is not positive"):
        make_schedule("gpipe", 2, 0)
