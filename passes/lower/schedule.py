"""The order of forward and backward actions on each pipeline rank, taken from torch's own schedule classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snnpart import compat, schedules
from snnpart.errors import PlanError
from snnpart.program import Action

Schedule = Mapping[int, tuple[Action, ...]]


def make_schedule(name: str, pp: int, microbatches: int, per_rank: int = 1) -> tuple[Schedule, tuple[str, ...]]:
    """Actions of each pipeline rank for `microbatches` microbatches, and notices.

    1F1B starts with one forward for every stage that follows, so torch's order needs at least as many microbatches as
    stages. With fewer, all of them are in flight at once whatever the order: GPipe's is taken, and a notice says so.
    On one rank with one stage every schedule is 1F1B.

    Raises:
        PlanError: the schedule does not run this number of microbatches.
    """
    if microbatches < 1:
        raise PlanError(f"microbatches={microbatches} is not positive", fix="give at least one microbatch")
    if not schedules.takes(name, pp, microbatches):
        raise PlanError(
            f"schedule={name!r} over pp={pp} ranks runs microbatches in {microbatches // pp} rounds of the same size, "
            f"which {microbatches} do not make",
            fix=f"give microbatches={schedules.nearest(name, pp, microbatches)}, or take a schedule that can",
            choices=schedules.able(pp, microbatches),
        )
    notices: tuple[str, ...] = ()
    if pp == 1 and name != "gpipe":
        name = "1f1b"
    if name == "1f1b" and microbatches < pp:
        notices = (
            f"1F1B over {pp} stages needs at least {pp} microbatches; with {microbatches} the order is GPipe's "
            f"(all forwards, then all backwards), and stages wait longer",
        )
        name = "gpipe"
    order = compat.pipeline_order(name, pp, per_rank, microbatches)
    return {rank: tuple(Action(*action) for action in actions) for rank, actions in order.items()}, notices


def in_flight(actions: Sequence[Action], stage: int | None = None) -> int:
    """The most microbatches whose saved values are held at once: of one stage, or of all in `actions`."""
    held = most = 0
    for action in actions:
        if stage is None or action.stage == stage:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
    return most
