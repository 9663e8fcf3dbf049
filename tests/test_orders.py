"""The order of actions is torch's, complete and free of deadlock for any counts."""

from __future__ import annotations

import pytest

from snnpart import schedules
from snnpart.errors import PlanError
from snnpart.orders import in_flight, make_schedule


def test_one_f_one_b() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    assert " ".join(map(str, schedule[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, schedule[1])) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_gpipe() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    assert " ".join(map(str, schedule[0])) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_each_microbatch_once_each_way(stages: int, microbatches: int) -> None:
    for name in schedules.able(stages, microbatches):
        per_rank = schedules.stages_per_rank(name, stages, 0)
        for actions in make_schedule(name, stages, microbatches, per_rank).values():
            own = sorted({action.stage for action in actions})
            halves = "FIW" if schedules.KINDS[name].splits and stages > 1 else "FB"
            for stage in own:
                for microbatch in range(microbatches):
                    kinds = {a.kind for a in actions if (a.stage, a.microbatch) == (stage, microbatch)}
                    assert kinds in ({"F", "B"}, set(halves))


def test_one_f_one_b_holds_fewer_microbatches() -> None:
    assert in_flight(make_schedule("1f1b", 4, 8)[3]) == 1
    assert in_flight(make_schedule("1f1b", 4, 8)[0]) == 4
    assert in_flight(make_schedule("gpipe", 4, 8)[0]) == 8


def test_what_a_schedule_cannot_run_is_refused_with_those_that_can() -> None:
    with pytest.raises(PlanError, match=r"'1f1b' over pp=3 ranks fills its 3 stages .* and 2 are too few") as refused:
        make_schedule("1f1b", 3, 2)
    assert "give microbatches=3" in str(refused.value)
    assert str(refused.value).endswith("valid: gpipe, interleaved-1f1b, interleaved-zb, zbv")
    with pytest.raises(PlanError, match=r"runs microbatches in 2 rounds of the same size, which 5 do not make"):
        make_schedule("interleaved-zb", 2, 5, 2)
    with pytest.raises(PlanError, match="microbatches=0 is not positive"):
        make_schedule("gpipe", 2, 0)
