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
from dataclasses import dataclass
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

    Of the largest microbatch too: the most beyond what is saved in `forward`, in `backward` and in its first half
    (`inputs`), and the gradients that this one keeps for the second (`gates`). `largest`: the largest gradient of a
    parameter. `workspace`: what a library keeps for the stage's products.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    saved: int = 0
    in_flight: int = 0
    forward: int = 0
    backward: int = 0
    inputs: int = 0
    gates: int = 0
    largest: int = 0
    workspace: int = 0

    @property
    def tensors(self) -> int:
        """What is held between the steps, and the gradients."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """The most that the stage holds at one time."""
        return self.tensors + self.saved * self.in_flight


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """The same for all stages of a rank; `saved` is the most that their microbatches hold at one time, `peak` the most
    of everything at one time."""

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
        parameters=total("parameters"),
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
    learned = sum(stage.gradients for stage in stages.values())
    now = sum(stage.tensors for stage in stages.values()) - learned + max(s.workspace for s in stages.values())
    most = now + 2 * learned  # the optimizer's step
    begun: set[int] = set()
    for action in actions:
        stage = stages[action.stage]
        grads = 0 if action.stage in begun or action.kind in "FI" else stage.gradients
        most = max(most, now + _while(action.kind, stage, grads))
        now += _left(action.kind, stage) + grads
        begun.update([action.stage] if action.kind in "BW" else [])
    return most


def _while(kind: str, stage: Footprint, grads: int) -> int:
    """Bytes beyond those before an action while it runs. `grads`: the gradients it makes, else it adds to others."""
    made = grads or stage.largest
    return {
        "F": stage.saved + stage.forward,
        "B": max(stage.backward, made),
        "I": stage.inputs,
        "W": made if stage.gates else max(stage.backward, made),
    }[kind]


def _left(kind: str, stage: Footprint) -> int:
    """Bytes that an action leaves, or gives back."""
    return {"F": stage.saved, "B": -stage.saved, "I": stage.gates, "W": -stage.saved - stage.gates}[kind]


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
