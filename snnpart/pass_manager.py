"""Runs passes in order: checks what each reads, verifies the graph after each, times it, and tells the instruments.

A pass is a frozen dataclass whose fields are its options. It says which facts it reads and writes and which tier of
numerics it keeps: `exact` (bit-equal in float64 on one rank) or `reassociates`. The runner verifies, never the pass.

    PassManager(ANALYZE, instruments=(DumpAfter(directory),)).run(graph)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from snnpart import verify
from snnpart.collector import collector_paused
from snnpart.errors import PlanError
from snnpart.facts import Origin, Value, Values
from snnpart.graph import SpikeGraph
from snnpart.program import PassRecord

Tier = Literal["exact", "reassociates"]
TRACED: tuple[type, ...] = (Value, Values, Origin)
_WRITTEN = "facts"


class Pass(Protocol):
    """What the runner needs of a pass; `run` changes the graph in place."""

    name: ClassVar[str]
    reads: ClassVar[tuple[type, ...]]
    writes: ClassVar[tuple[type, ...]]
    tier: ClassVar[Tier]

    def run(self, graph: SpikeGraph) -> None: ...


class Instrument(Protocol):
    """Watches the passes; it may raise `Stop` to end the run after the current pass."""

    def before(self, item: Pass, graph: SpikeGraph) -> None: ...
    def after(self, item: Pass, graph: SpikeGraph, record: PassRecord) -> None: ...


class Stop(Exception):
    """Raised by an instrument: no further pass is run."""


@dataclass(frozen=True)
class PassManager:
    """An ordered list of passes and the instruments that watch them."""

    passes: Sequence[Pass]
    instruments: Sequence[Instrument] = ()
    verify: bool = True

    def run(self, graph: SpikeGraph) -> tuple[PassRecord, ...]:
        """Run all passes on `graph` in place; a record per pass that ran.

        Raises:
            PlanError: a pass reads a fact that neither the graph holds nor an earlier pass writes.
            VerifyError: a pass left the graph in a form that the IR does not allow; the message names the pass.
        """
        self._check_reads(graph)
        records: list[PassRecord] = []
        try:
            with collector_paused():
                for item in self.passes:
                    records.append(self._run_one(item, graph, records))
        except Stop:
            pass
        return tuple(records)

    def _check_reads(self, graph: SpikeGraph) -> None:
        known = {kind.__name__ for kind in TRACED} | written(graph)
        for item in self.passes:
            missing = sorted({kind.__name__ for kind in item.reads} - known)
            if missing:
                raise PlanError(
                    f"it reads the facts {missing}, which no pass before it writes",
                    where=f"pass '{item.name}'",
                    fix="run the pass that writes them first",
                    choices=sorted(known),
                )
            known |= {kind.__name__ for kind in item.writes}

    def _run_one(self, item: Pass, graph: SpikeGraph, records: list[PassRecord]) -> PassRecord:
        for instrument in self.instruments:
            instrument.before(item, graph)
        nodes, start = len(graph.graph.nodes), time.perf_counter()
        item.run(graph)
        record = PassRecord(item.name, time.perf_counter() - start, nodes, len(graph.graph.nodes))
        _note_written(graph, item.writes)
        if self.verify:
            verify.verify(graph, verify.level_of(written(graph)), after=item.name)
        return self._tell(item, graph, record, records)

    def _tell(self, item: Pass, graph: SpikeGraph, record: PassRecord, records: list[PassRecord]) -> PassRecord:
        try:
            for instrument in self.instruments:
                instrument.after(item, graph, record)
        except Stop:
            records.append(record)
            raise
        return record


def written(graph: SpikeGraph) -> set[str]:
    """Names of the facts that passes have written on this graph (also those that no node happens to hold)."""
    return set(graph.notes.get(_WRITTEN, "").split())


def _note_written(graph: SpikeGraph, kinds: Iterable[type]) -> None:
    names = written(graph) | {kind.__name__ for kind in kinds}
    if names:
        graph.notes[_WRITTEN] = " ".join(sorted(names))


def pipeline_names(passes: Iterable[Pass]) -> str:
    """The passes as one line of text, for fingerprints and reports."""
    return ",".join(item.name for item in passes)
