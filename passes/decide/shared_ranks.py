"""The best cut where several stages share a rank, and its memory: their bytes add up (`cut` states the problem).

The cut without a bound is taken if it keeps it. Otherwise an integer program (HiGHS) chooses b[s, i], whether part i
lies in stage s or later. Times and tensors of a stage are linear in b, a value at the stage's first place is
sum v_i (b[s, i] - b[s, i-1]), and what a stage sends is bounded by what crosses its end and is kept by nobody. For each
rank and each of its moments (`footprint.held_together`) the bytes are at most the bound. Of more than `MOST` places the
cheapest to cut are the candidates; within these the answer is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from snnpart.passes.decide.cut import Held, barred, best_cut, edges
from snnpart.passes.decide.integer_program import IntegerProgram

MOST = 96
"""Places that the integer program chooses from."""


@dataclass(frozen=True, eq=False)
class SharedRanks:
    """Several stages a rank: for each rank, how many microbatches its stages hold together at the times that count
    (`footprint.held_together`), and the share of the batch in one microbatch."""

    moments: Sequence[Sequence[Mapping[int, int]]]
    part: float

    def bytes(self, held: Held, cuts: Sequence[int]) -> list[float]:
        """What each rank holds under a cut."""
        bounds = [0, *cuts, len(held.tensors)]
        ranges = list(zip(bounds, bounds[1:], strict=False))
        edge = np.append(held.received, 0.0)
        saved = [held.made[i:j].sum() + held.sent[i, j] + edge[i] for i, j in ranges]
        found = []
        for moments in self.moments:
            own = {stage for moment in moments for stage in moment}
            most = max(self.part * sum(saved[s] * n for s, n in moment.items()) for moment in moments)
            found.append(most + sum(held.tensors[slice(*ranges[s])].sum() for s in own))
        return found


def best_shared_cut(
    work: np.ndarray, crossing: np.ndarray, pins: Sequence[int | None], stages: int, held: Held, ranks: SharedRanks,
    memory: float,
) -> list[int] | None:  # fmt: skip
    """The best cut where several stages share a rank and its bytes; None when none keeps the bound."""
    without = best_cut(work, crossing, barred(pins, stages))
    if without is None or max(ranks.bytes(held, without)) <= memory:
        return without
    return _Shared(work, crossing, pins, stages, held, ranks, memory).solve()


class _Shared:
    """The integer program: b[s][i] says whether candidate i lies in stage s or later."""

    def __init__(
        self, work: np.ndarray, crossing: np.ndarray, pins: Sequence[int | None], stages: int, held: Held,
        ranks: SharedRanks, memory: float,
    ) -> None:  # fmt: skip
        self.stages, self.program = stages, IntegerProgram()
        self.starts = _candidates(edges(crossing), work, pins, stages)
        self.edge = edges(crossing)[self.starts]
        self.work = np.add.reduceat(work, self.starts)
        self.scale = float(work.sum() + 2 * self.edge.max(initial=0.0)) or 1.0
        self.b = [[self.program.variable(integer=True) for _ in self.starts] for _ in range(stages - 1)]
        self._order()
        self._pin([pins[start] for start in self.starts])
        self._time()
        for moments in ranks.moments:
            for moment in moments:
                self._memory(held, moments, moment, ranks.part, memory)

    def solve(self) -> list[int] | None:
        """First positions of the stages 1.. ."""
        found = self.program.solve()
        if found is None:
            return None
        return [int(self.starts[next(i for i, at in enumerate(row) if found[at] > 0.5)]) for row in self.b]

    def _order(self) -> None:
        """Stages follow each other, and each holds something."""
        for s, row in enumerate(self.b):
            self.program.constrain({row[0]: 1.0}, high=0.0)
            self.program.constrain({row[-1]: 1.0}, low=1.0)
            for before, after in zip(row, row[1:], strict=False):
                self.program.constrain({after: 1.0, before: -1.0}, low=0.0)
            if s + 1 < len(self.b):
                for i, at in enumerate(row):
                    self.program.constrain({at: 1.0, self.b[s + 1][i]: -1.0}, low=0.0)
                self.program.constrain({**dict.fromkeys(row, 1.0), **dict.fromkeys(self.b[s + 1], -1.0)}, low=1.0)

    def _pin(self, pins: Sequence[int | None]) -> None:
        for i, pin in enumerate(pins):
            if pin is not None and pin > 0:
                self.program.constrain({self.b[pin - 1][i]: 1.0}, low=1.0)
            if pin is not None and pin < self.stages - 1:
                self.program.constrain({self.b[pin][i]: 1.0}, high=0.0)

    def _time(self) -> None:
        """The slowest stage, in parts of the whole work; sends count a little by themselves."""
        slowest = self.program.variable(1.0)
        for s in range(self.stages):
            terms, constant = self._within(s, self.work / self.scale)
            for boundary in (s, s + 1):
                _add(terms, self._at(boundary, self.edge / self.scale))
            self.program.at_least(slowest, terms, constant)
        for s in range(1, self.stages):
            for at, factor in self._at(s, self.edge / self.scale).items():
                self.program.costs[at] += 1e-4 * factor

    def _memory(
        self, held: Held, moments: Sequence[Mapping[int, int]], moment: Mapping[int, int], part: float, memory: float
    ) -> None:
        """What a rank holds at one of its moments is within the bound, in parts of it."""
        total: dict[int, float] = {}
        fixed = 0.0
        tensors = np.add.reduceat(held.tensors, self.starts) / memory
        made = np.add.reduceat(held.made, self.starts) * part / memory
        received = held.received[self.starts] * part / memory
        sent = held.sent[0, self.starts] * part / memory
        for s in sorted({stage for one in moments for stage in one}):
            count = moment.get(s, 0)
            terms, constant = self._within(s, tensors + count * made)
            _add(terms, self._at(s, count * received))
            _add(terms, self._at(s + 1, count * sent))
            _add(total, terms)
            fixed += constant
        self.program.constrain(total, high=1.0 - fixed)

    def _within(self, s: int, values: np.ndarray) -> tuple[dict[int, float], float]:
        """The sum of the values in stage s."""
        terms: dict[int, float] = {}
        if s > 0:
            _add(terms, dict(zip(self.b[s - 1], values, strict=True)))
        if s < self.stages - 1:
            _add(terms, dict(zip(self.b[s], -values, strict=True)))
        return terms, float(values.sum()) if s == 0 else 0.0

    def _at(self, s: int, values: np.ndarray) -> dict[int, float]:
        """The value at the place where stage s begins (0 at both ends)."""
        if not 0 < s < self.stages:
            return {}
        row = self.b[s - 1]
        terms = dict(zip(row, values, strict=True))
        for i in range(len(row) - 1):
            terms[row[i]] -= values[i + 1]
        return terms


def _add(terms: dict[int, float], more: Mapping[int, float]) -> None:
    for variable, factor in more.items():
        terms[variable] = terms.get(variable, 0.0) + factor


def _candidates(edge: np.ndarray, work: np.ndarray, pins: Sequence[int | None], stages: int) -> np.ndarray:
    """Places where a stage may begin, 0 first: all, or the cheapest one of each of `MOST` equal shares of work."""
    count = len(work)
    if count <= max(MOST, 2 * stages):
        return np.arange(count)
    shares = np.minimum((np.cumsum(work) / max(work.sum(), 1e-30) * MOST).astype(int), MOST - 1)
    changes = {i for i in range(1, count) if pins[i] != pins[i - 1]}
    cheapest = {int(min(np.flatnonzero(shares == k), key=lambda i: edge[i])) for k in np.unique(shares)}
    return np.array(sorted({0} | changes | cheapest))
