"""The best cut of an order of parts into stages.

The problem. Let the parts with keys (see `parts`) be 0..K-1 in topological order, w_i the predicted time, forward and
backward, of everything at position i, and c_i the time to send what crosses the boundary before part i, values and
returning gradients (c_0 = c_K = 0). Choose 0 = k_0 < k_1 < ... < k_S = K so that

    the slowest stage, max over s of  sum of w_i for k_s <= i < k_{s+1}  +  c_{k_s} + c_{k_{s+1}},   is smallest,

under the bound that no rank holds more bytes than it may, and among such cuts one with the smallest sum of the c. A
value that a later stage needs is handed on by every stage between, so c_i counts every value made before i and used at
or after i, skips included. A stage s = [i, j) takes the bytes

    t_i + ... + t_{j-1}  +  f_s (A(i) + B(i, j))

with t the tensors and what training keeps of them, f_s the share of the batch that is in flight on stage s (fewer
microbatches on later stages under 1F1B), A(i) what it receives, and B(i, j) what it makes and either keeps for backward
or sends (`places`).

The method, one stage a rank: dynamic programming over (stage, first part of the next stage), exact, O(S K^2) in numpy;
a second round minimises traffic among cuts that reach the optimum of the first. Ranges that contradict pins or the
bound are infinitely dear. Repeated blocks need no treatment of their own: 600 parts into 8 stages take 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class Held:
    """Bytes at the places of an order, of the whole batch.

    `tensors[i]`: tensors at i with what training keeps of them. `made[i]`: what part i makes and backward keeps.
    `received[i]`: what crosses the boundary before i. `sent[i, j]`: what parts i..j-1 make, nobody keeps and a later
    stage needs.
    """

    tensors: np.ndarray
    made: np.ndarray
    received: np.ndarray
    sent: np.ndarray

    def of_stages(self, shares: Sequence[float]) -> list[np.ndarray]:
        """For each stage, with its share of the batch in flight: the bytes of [i, j), by i and j."""
        tensors, made = _ranges(self.tensors), _ranges(self.made)
        edge = np.append(self.received, 0.0)
        return [tensors + share * (made + self.sent + edge[:, None]) for share in shares]


def _ranges(values: np.ndarray) -> np.ndarray:
    """Sums of [i, j) by i and j."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    found: np.ndarray = total[None, :] - total[:, None]
    return found


def barred(pins: Sequence[int | None], stages: int) -> np.ndarray:
    """barred[s, i]: how many of the parts before i are pinned to a stage other than s."""
    found = np.zeros((stages, len(pins) + 1))
    for i, pin in enumerate(pins):
        found[:, i + 1] = found[:, i] + [pin is not None and pin != stage for stage in range(stages)]
    return found


def best_cut(
    work: np.ndarray,
    crossing: np.ndarray,
    barred: np.ndarray,
    held: Sequence[np.ndarray] | None = None,
    memory: float = 0.0,
) -> list[int] | None:
    """The cut described at the top of this file: first positions of stages 1.., or None when there is none.

    `work` and `crossing` have one entry a part, in microseconds; `barred[s, i]` counts parts before i that stage s may
    not hold; `held[s][i, j]` are the bytes of stage s were it [i, j), at most `memory`.
    """
    stages, count = barred.shape[0], len(work)
    edge = edges(crossing)
    span = _ranges(work) + edge[:, None] + edge[None, :]
    allowed = [np.where(_excluded(row, count), np.inf, span) for row in barred]
    if held is not None:
        allowed = [np.where(size > memory, np.inf, cost) for cost, size in zip(allowed, held, strict=True)]
    slowest, _ = _stepwise(allowed, lambda best, cost: np.maximum(best[:, None], cost))
    limit = slowest * (1 + _SAME)
    if not np.isfinite(limit):
        return None
    traffic = [np.where(cost <= limit, np.broadcast_to(edge, cost.shape), np.inf) for cost in allowed]
    _, cuts = _stepwise(traffic, lambda best, cost: best[:, None] + cost)
    return cuts[: stages - 1]


def slowest_us(work: np.ndarray, crossing: np.ndarray, cuts: Sequence[int]) -> float:
    """The time of the slowest stage of a cut."""
    edge, bounds = edges(crossing), [0, *cuts, len(work)]
    return max(float(work[i:j].sum() + edge[i] + edge[j]) for i, j in zip(bounds, bounds[1:], strict=False))


def least_bytes(barred: np.ndarray, held: Sequence[np.ndarray]) -> float:
    """The bytes of the largest stage where they are fewest."""
    count = barred.shape[1] - 1
    allowed = [np.where(_excluded(row, count), np.inf, size) for row, size in zip(barred, held, strict=True)]
    return _stepwise(allowed, lambda best, cost: np.maximum(best[:, None], cost))[0]


def edges(crossing: np.ndarray) -> np.ndarray:
    """Microseconds at each boundary, both ends of the network included."""
    return np.concatenate([[0.0], crossing[1:], [0.0]])


def _excluded(row: np.ndarray, count: int) -> np.ndarray:
    """Ranges that are empty or hold a part that is pinned elsewhere."""
    found: np.ndarray = (row[None, :] > row[:, None]) | np.tri(count + 1, dtype=bool)
    return found


def _stepwise(
    costs: Sequence[np.ndarray], join: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, list[int]]:
    """Best value of stages that end at the last part, and where each stage ends."""
    count = costs[0].shape[0] - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices = []
    for cost in costs:
        reached = join(best, cost)
        choices.append(np.argmin(reached, axis=0))
        best = np.min(reached, axis=0)
    ends = [count]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(best[count]), ends[::-1][1:]
