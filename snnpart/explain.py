"""The answer to "why does this layer lie so?", as data: made by the decision passes, shown by the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    """One rule for a layer, with the best plan around it: predicted microseconds of a step on a rank (None: there is no
    such plan), those of its collectives, how many they are, and why the rule was taken, lost or is unavailable."""

    rule: str
    step_us: float | None
    collectives_us: float
    collectives: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Why:
    """All rules for one layer, the chosen one named; `note` is what the kind of request forbids."""

    path: str
    chosen: str
    alternatives: tuple[Alternative, ...]
    note: str = ""

    def __str__(self) -> str:
        width = max((len(item.rule) for item in self.alternatives), default=0)
        lines = [f"{self.path}: {self.chosen}"]
        for item in self.alternatives:
            time = "          -" if item.step_us is None else f"{item.step_us:8.1f} us"
            lines.append(f"  {item.rule:<{width}}  {time}  {item.verdict}")
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])
