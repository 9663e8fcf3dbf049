"""What a rank holds in a training step, in bytes: predicted for a plan, and bounded by `memory=`.

    tensors    parameters, a gradient for each that learns, two moments of an optimizer (Adam's), buffers
    saved      what backward needs of one microbatch, and the values it received and sent, times the microbatches that
               are in flight on the stage

A rank with several stages holds the tensors of all; of saved values the most that are there at one time, which its
order of actions says. That is `total`, which the cut is made by.

`peak` goes through the rank's actions one by one: there are no gradients before the first backward, each action needs
more than it leaves, the first half of a backward leaves gradients for the second, a step of the optimizer needs a value
for each number it trains (torch's own on a GPU, several tensors at once), and a library keeps memory for its products.
Not in it: what kernels take for a moment, the batch itself, and what the framework takes outside its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

MOMENTS = 2
"""Values an optimizer keeps for each number it trains."""


class Acts(Protocol):
    """An entry of a schedule (`program.Action`)."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one stage on one rank. `saved` is of the largest microbatch, `in_flight` their number.

    Of the largest microbatch too: the most beyond what is saved in `forward`, in the first backward of a step, which
    makes the gradients of parameters, in others (`backward`), and in the first half of one (`inputs`), which keeps
    `gates` for the second. `largest`: the largest gradient of a parameter. `workspace`: what a library keeps for the
    stage's products. `gathered`: units of FSDP2 that are whole at a time.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    saved: int = 0
    in_flight: int = 0
    forward: int = 0
    first_backward: int = 0
    backward: int = 0
    inputs: int = 0
    gates: int = 0
    largest: int = 0
    workspace: int = 0
    gathered: int = 0

    @property
    def tensors(self) -> int:
        """What is held between the steps, the gradients, and what is gathered."""
        return self.parameters + self.gathered + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """The most that the stage holds at one time."""
        return self.tensors + self.saved * self.in_flight


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """The same for all stages of a rank; `saved` is the most that their microbatches hold at one time, `peak` the most
    of everything at one time. `parameters` has what FSDP2 gathers."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    saved: int
    peak: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.saved


def of_rank(actions: Sequence[Acts], stages: Mapping[int, Footprint]) -> RankFootprint:
    """What a rank holds that runs these actions on these stages."""
    total = lambda name: sum(getattr(stage, name) for stage in stages.values())  # noqa: E731
    return RankFootprint(
        parameters=total("parameters") + total("gathered"),
        gradients=total("gradients"),
        optimizer=total("optimizer"),
        buffers=total("buffers"),
        saved=max(
            (sum(stages[s].saved * n for s, n in held.items()) for held in held_together(actions)),
            default=0,
        ),
        peak=_peak(actions, stages),
    )


def _peak(actions: Sequence[Acts], stages: Mapping[int, Footprint]) -> int:
    """The most that a rank holds at one time of a step."""
    now = sum(stage.tensors - stage.gradients for stage in stages.values())
    now += max(stage.workspace for stage in stages.values())
    trained = sum(stage.optimizer for stage in stages.values()) // MOMENTS
    most = now - sum(stage.gathered for stage in stages.values()) + 2 * trained  # the optimizer's step
    begun: set[int] = set()
    for action in actions:
        stage = stages[action.stage]
        first = action.kind in "BW" and action.stage not in begun
        most = max(most, now + _while(action.kind, stage, first))
        now += _left(action.kind, stage) + first * stage.gradients
        begun.update([action.stage] if action.kind in "BW" else [])
    return most


def _while(kind: str, stage: Footprint, first: bool) -> int:
    """Bytes beyond those before an action while it runs; `first`: it makes the gradients of parameters."""
    whole = max(stage.first_backward, stage.gradients) if first else stage.backward
    halved = stage.gradients if first else stage.largest
    return {
        "F": stage.saved + stage.forward,
        "B": whole,
        "I": stage.inputs if stage.gates else 0,
        "W": halved if stage.gates else whole,
    }[kind]


def _left(kind: str, stage: Footprint) -> int:
    """Bytes that an action leaves, or gives back."""
    return {"F": stage.saved, "B": -stage.saved, "I": stage.gates, "W": -stage.saved - stage.gates}[kind]


def in_shards(whole: Footprint, units: Sequence[int], dp: int, again: bool, microbatches: int) -> Footprint:
    """A stage under FSDP2 over `dp` ranks, of which one has a share of each unit and of its moments.

    Args:
        units: their bytes, in the order of the forward.
        again: they are sharded again after forward, so that two neighbours are whole at a time; else all are.
        microbatches: gradients of several are added whole, those of one go unit by unit.
    """
    pairs = [sum(units[i : i + 2]) for i in range(len(units))]
    two, every = max(pairs, default=0), sum(units)
    shards = sum(-(-unit // dp) for unit in units)
    return replace(
        whole,
        parameters=whole.parameters - every + shards,
        gradients=whole.gradients - every + (every if microbatches > 1 else min(every, two + shards)),
        optimizer=whole.optimizer - MOMENTS * (every - shards),
        gathered=two if again else every,
    )


def held_together(actions: Iterable[Acts]) -> list[dict[int, int]]:
    """How many microbatches are in flight on each stage, at the times at which no more are on any stage later without
    fewer on another: the most is at one of these whatever a microbatch weighs."""
    now: dict[int, int] = {}
    seen: list[dict[int, int]] = []
    for action in actions:
        change = {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        now = {**now, action.stage: now.get(action.stage, 0) + change}
        if change > 0:
            seen.append(now)
    return [
        one for i, one in enumerate(seen) if not any(_covers(two, one, j < i) for j, two in enumerate(seen) if j != i)
    ]


def _covers(more: Mapping[int, int], less: Mapping[int, int], earlier: bool) -> bool:
    """Whether one has at least as many of everything; of two that are equal the earlier one counts."""
    stages = {*more, *less}
    at_least = all(more.get(s, 0) >= less.get(s, 0) for s in stages)
    return at_least and (earlier or any(more.get(s, 0) > less.get(s, 0) for s in stages))


def largest_part(batch: int, microbatches: int) -> float:
    """The share of a batch in its largest microbatch."""
    return -(-batch // microbatches) / batch if batch else 1.0
