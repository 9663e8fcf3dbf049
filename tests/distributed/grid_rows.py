"""Which combinations of network, schedule, topology and number of microbatches the grid runs.

Every schedule meets every topology with each of 1 to 5 microbatches that it takes there; each such row gets the network
that makes the most pairs and triples of choices meet for the first time, and rows are added until each network has met
each schedule, each topology, each number of microbatches, and each schedule on each topology. What no row can be made
of (more stages than a network has parts) is left out; all of it is found by counting, the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snnpart import schedules
from tests.distributed.grid_nets import MOST, NETS

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}), "pp3": (3, {"pp": 3}), "pp4": (4, {"pp": 4}), "pp2-tp2": (4, {"pp": 2, "tp": 2}),
    "pp2-ddp2": (4, {"pp": 2, "dp": "ddp"}), "pp2-fsdp2": (4, {"pp": 2, "dp": "fsdp2"}),
}  # fmt: skip
COUNTS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Row:
    """One combination."""

    name: str
    schedule: str
    topology: str
    microbatches: int

    @property
    def ranks(self) -> int:
        return TOPOLOGIES[self.topology][0]

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of `parallelize`."""
        return {**TOPOLOGIES[self.topology][1], "schedule": self.schedule, "microbatches": self.microbatches}

    @property
    def batch(self) -> int:
        """Samples of each dp rank: microbatches are of unequal sizes where there can be such."""
        return 3 if self.microbatches <= 2 else 5

    @property
    def text(self) -> tuple[str, ...]:
        """Its name in lists of tests."""
        return self.name, self.topology, self.schedule, str(self.microbatches)

    @property
    def can_run(self) -> bool:
        """Whether the schedule takes so many microbatches and the network can be cut so often."""
        pp = self.how["pp"]
        wanted = pp * schedules.stages_per_rank(self.schedule, pp, 0)
        return schedules.takes(self.schedule, pp, self.microbatches) and wanted <= MOST[self.name]

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        """What must meet in some row."""
        name, schedule, topology, m = self.name, self.schedule, self.topology, self.microbatches
        return {(schedule, topology, m), (name, schedule), (name, topology), (name, m), (name, schedule, topology)}

    @property
    def triples(self) -> set[tuple[Any, ...]]:
        """What shall meet where it costs no row more."""
        return {(self.name, self.schedule, self.microbatches), (self.name, self.topology, self.microbatches)}


def every() -> Iterator[Row]:
    """All combinations that can run."""
    product = itertools.product(NETS, schedules.NAMES, TOPOLOGIES, COUNTS)
    return (row for row in itertools.starmap(Row, product) if row.can_run)


def covering() -> list[Row]:
    """The rows described at the top of this file."""
    left = list(every())
    open_pairs: set[tuple[Any, ...]] = set().union(*(row.pairs for row in left))
    open_triples: set[tuple[Any, ...]] = set().union(*(row.triples for row in left))
    used = dict.fromkeys(NETS, 0)
    chosen: list[Row] = []
    while open_pairs:
        gain = lambda row: (len(row.pairs & open_pairs), len(row.triples & open_triples), -used[row.name])  # noqa: E731
        best = max(left, key=gain)
        chosen.append(best)
        used[best.name] += 1
        open_pairs -= best.pairs
        open_triples -= best.triples
        left.remove(best)
    return chosen
