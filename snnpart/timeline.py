"""When each action of a schedule runs: the schedule as a grid of ranks by ticks, and the share of idle time.

Every rank runs its actions in order, each as soon as the rank is free and what it waits for is done. Messages take no
time here: the cut has counted them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from snnpart.dryrun import waits_for
from snnpart.program import Action, CompiledProgram

TICKS: Mapping[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class Timeline:
    """Start and end of each action, by rank, in the unit of the durations."""

    spans: Mapping[int, tuple[tuple[Action, float, float], ...]]

    @property
    def end(self) -> float:
        return max((end for spans in self.spans.values() for _, _, end in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait, 0 to 1."""
        busy = sum(end - start for spans in self.spans.values() for _, start, end in spans)
        return 1 - busy / (self.end * len(self.spans)) if self.end else 0.0

    def grid(self) -> tuple[str, ...]:
        """One line a rank, one column a tick: `0F1`, then `---` while it lasts, blank while the rank waits."""
        width = max((len(str(action)) for spans in self.spans.values() for action, _, _ in spans), default=0)
        lines = []
        for rank, spans in sorted(self.spans.items()):
            cells = [" " * width] * round(self.end)
            for action, start, end in spans:
                cells[round(start)] = str(action).ljust(width)
                cells[round(start) + 1 : round(end)] = ["-" * width] * (round(end) - round(start) - 1)
            lines.append(f"rank {rank} | {' '.join(cells)}".rstrip())
        return tuple(lines)


def timeline(schedule: Mapping[int, Sequence[Action]], duration: Callable[[Action], float]) -> Timeline:
    """Carry the schedule out on a clock. The schedule must be one that the dry run accepts."""
    last = max((action.stage for actions in schedule.values() for action in actions), default=0)
    done: dict[Action, float] = {}
    free = dict.fromkeys(schedule, 0.0)
    spans: dict[int, list[tuple[Action, float, float]]] = {rank: [] for rank in schedule}
    waiting = {rank: list(actions) for rank, actions in schedule.items()}
    while any(waiting.values()):
        for rank, actions in waiting.items():
            while actions and (ready := _ready(actions[0], last, done)) is not None:
                action = actions.pop(0)
                start = max(free[rank], ready)
                free[rank] = done[action] = start + duration(action)
                spans[rank].append((action, start, free[rank]))
    return Timeline({rank: tuple(found) for rank, found in spans.items()})


def _ready(action: Action, last: int, done: Mapping[Action, float]) -> float | None:
    """When everything that an action waits for is done; None while something is not."""
    ends = []
    for need in waits_for(action, last):
        kinds = "BI" if need.kind in "BI" else need.kind
        found = [done[at] for kind in kinds if (at := Action(need.stage, kind, need.microbatch)) in done]  # type: ignore[arg-type]
        if not found:
            return None
        ends.append(found[0])
    return max(ends, default=0.0)


def in_ticks(schedule: Mapping[int, Sequence[Action]]) -> Timeline:
    """Equal stages: a forward takes one tick, a backward two, each half of one a tick."""
    return timeline(schedule, lambda action: TICKS[action.kind])


def predicted(compiled: CompiledProgram) -> Timeline:
    """By the predicted times of the stages, in microseconds."""
    tp, count = range(compiled.plan.tp), range(compiled.plan.stage_count)
    forward = [max(compiled.stage(s, rank).forward_us for rank in tp) for s in count]
    backward = [max(compiled.stage(s, rank).backward_us for rank in tp) for s in count]
    return by_stage(compiled.schedule, forward, backward)


def by_stage(schedule: Mapping[int, Sequence[Action]], forward: Sequence[float], backward: Sequence[float]) -> Timeline:
    """From each stage's time of a step, forward and backward, over equal microbatches; each half of a backward takes
    half of it."""
    microbatches = 1 + max((a.microbatch for actions in schedule.values() for a in actions), default=0)
    shares = {"F": (forward, 1.0), "B": (backward, 1.0), "I": (backward, 0.5), "W": (backward, 0.5)}

    def duration(action: Action) -> float:
        times, share = shares[action.kind]
        return share * times[action.stage] / microbatches

    return timeline(schedule, duration)
