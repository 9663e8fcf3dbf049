"""The order of forward and backward actions on each pipeline rank, taken from torch's own schedule classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snnpart import compat, schedules
from snnpart.program import Action

Schedule = Mapping[int, tuple[Action, ...]]


def make_schedule(name: str, pp: int, microbatches: int, per_rank: int = 1) -> Schedule:
    """Actions of each pipeline rank for `microbatches` microbatches.

    On one rank with one stage every schedule but GPipe is 1F1B.

    Raises:
        PlanError: the schedule does not run this number of microbatches.
    """
    schedules.check(name, pp, microbatches)
    if pp == 1 and name != "gpipe":
        name = "1f1b"
    order = compat.pipeline_order(name, pp, per_rank, microbatches)
    return {rank: tuple(Action(*action) for action in actions) for rank, actions in order.items()}


def in_flight(actions: Sequence[Action], stage: int | None = None) -> int:
    """The most microbatches whose saved values are held at once: of one stage, or of all in `actions`."""
    held = most = 0
    for action in actions:
        if stage is None or action.stage == stage:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
    return most
