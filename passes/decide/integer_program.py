"""A mixed-integer program under construction: variables in [0, 1] with costs, and linear constraints; HiGHS solves it.

The solution depends on the program alone, never on the clock: all ranks find the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, sparse


@dataclass
class IntegerProgram:
    """Minimise the sum of `costs[i] * x[i]`; `rows` are (factors, low, high)."""

    costs: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, integer: bool = False) -> int:
        """A new variable, by its number."""
        self.costs.append(cost)
        self.integer.append(int(integer))
        return len(self.costs) - 1

    def constrain(self, terms: Mapping[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        """low <= sum of terms <= high."""
        self.rows.append((dict(terms), low, high))

    def at_least(self, target: int, terms: Mapping[int, float], constant: float = 0.0) -> None:
        """target >= terms + constant."""
        merged: dict[int, float] = defaultdict(float, {target: 1.0})
        for variable, factor in terms.items():
            merged[variable] -= factor
        self.constrain(merged, low=constant)

    def solve(self, costs: Mapping[int, float] | None = None) -> np.ndarray | None:
        """The values of all variables at the minimum (of other costs than its own, where given); None: infeasible."""
        if not self.costs:
            return np.zeros(0) if all(low <= 0 <= high for _, low, high in self.rows) else None
        found = optimize.milp(
            self._objective(costs),
            integrality=np.array(self.integer),
            bounds=optimize.Bounds(0, 1),
            constraints=self._constraints(),
        )
        solution: np.ndarray | None = found.x
        return solution

    def _objective(self, costs: Mapping[int, float] | None) -> np.ndarray:
        if costs is None:
            return np.array(self.costs)
        objective = np.zeros(len(self.costs))
        objective[list(costs)] = list(costs.values())
        return objective

    def _constraints(self) -> optimize.LinearConstraint:
        entries = [(i, j, v) for i, (terms, _, _) in enumerate(self.rows) for j, v in terms.items()]
        row, column, value = (np.array(part) for part in zip(*entries)) if entries else (np.zeros(0, int),) * 3
        matrix = sparse.csr_array((value, (row, column)), shape=(len(self.rows), len(self.costs)))
        low, high = (np.array([item[k] for item in self.rows]) for k in (1, 2))
        return optimize.LinearConstraint(matrix, low, high)
