"""The order of forward and backward actions on each stage, taken from torch's own schedule classes."""

from __future__ import annotations

from collections.abc import Mapping

from snnpart import compat
from snnpart.errors import PlanError
from snnpart.program import Action

Schedule = Mapping[int, tuple[Action, ...]]


def make_schedule(name: str, stages: int, microbatches: int) -> tuple[Schedule, tuple[str, ...]]:
    """Actions of each stage for `microbatches` microbatches, and notices.

    1F1B starts with one forward for every stage that follows, so torch's order needs at least as many microbatches as
    stages. With fewer, all of them are in flight at once whatever the order: GPipe's is taken, and a notice says so.

    Raises:
        PlanError: `microbatches` is not positive.
    """
    if microbatches < 1:
        raise PlanError(f"microbatches={microbatches} is not positive", fix="give at least one microbatch")
    notices: tuple[str, ...] = ()
    if name == "1f1b" and microbatches < stages:
        notices = (
            f"1F1B over {stages} stages needs at least {stages} microbatches; with {microbatches} the order is GPipe's "
            f"(all forwards, then all backwards), and stages wait longer",
        )
        name = "gpipe"
    order = compat.pipeline_order(name, stages, microbatches)
    return {stage: tuple(Action(*action) for action in actions) for stage, actions in order.items()}, notices


def in_flight(actions: tuple[Action, ...]) -> int:
    """The most microbatches whose saved values the stage holds at once."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most
