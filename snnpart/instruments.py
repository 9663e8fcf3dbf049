"""Instruments: what can be watched while passes run, and the search for the pass that broke something.

Log(write)              a line per pass: seconds and change in nodes
DumpAfter(directory)    the graph's text after each pass, `03-analyze-cost.txt`
OpCounts()              which operations a pass added and removed
StopAfter(name)         no pass after this one
bisect(graph, passes, check)   the first pass after which `check` no longer holds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from snnpart import text
from snnpart.errors import ConfigError
from snnpart.graph import SpikeGraph
from snnpart.pass_manager import Pass, PassManager, Stop
from snnpart.program import PassRecord


class Quiet:
    """An instrument that does nothing; the others override what they need."""

    def before(self, item: Pass, graph: SpikeGraph) -> None:
        """Called before a pass runs."""

    def after(self, item: Pass, graph: SpikeGraph, record: PassRecord) -> None:
        """Called after a pass has run and the graph was verified."""


@dataclass
class Log(Quiet):
    """Writes a line per pass."""

    write: Callable[[str], object] = print

    def after(self, item: Pass, graph: SpikeGraph, record: PassRecord) -> None:
        change = record.nodes_after - record.nodes_before
        self.write(f"{item.name:<20} {1e3 * record.seconds:8.1f} ms {record.nodes_after:6d} nodes ({change:+d})")


@dataclass
class DumpAfter(Quiet):
    """Writes the graph after each pass (or after those named) into a directory, numbered in order."""

    directory: Path
    names: Collection[str] = ()
    written: list[Path] = field(default_factory=list)
    _count: int = 0

    def after(self, item: Pass, graph: SpikeGraph, record: PassRecord) -> None:
        self._count += 1
        if self.names and item.name not in self.names:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{self._count:02d}-{item.name}.txt"
        path.write_text(text.print_graph(graph))
        self.written.append(path)


@dataclass
class OpCounts(Quiet):
    """For each pass, how many more or fewer nodes of each operation there are."""

    changes: dict[str, dict[str, int]] = field(default_factory=dict)
    _before: Counter[str] = field(default_factory=Counter)

    def before(self, item: Pass, graph: SpikeGraph) -> None:
        self._before = count_operations(graph.graph)

    def after(self, item: Pass, graph: SpikeGraph, record: PassRecord) -> None:
        now = count_operations(graph.graph)
        names = sorted(now.keys() | self._before.keys())
        self.changes[item.name] = {n: now[n] - self._before[n] for n in names if now[n] != self._before[n]}


def count_operations(graph: fx.Graph) -> Counter[str]:
    """Nodes of each operation, by the operation's name in the text form."""
    return Counter(_operation(node) for node in graph.nodes)


def _operation(node: fx.Node) -> str:
    return text.target_text(node) if node.op in ("call_method", "call_function") else node.op


@dataclass
class StopAfter(Quiet):
    """Ends the run after the named pass."""

    name: str

    def after(self, item: Pass, graph: SpikeGraph, record: PassRecord) -> None:
        if item.name == self.name:
            raise Stop


def bisect(graph: SpikeGraph, passes: Sequence[Pass], check: Callable[[SpikeGraph], bool]) -> str | None:
    """The name of the first pass after which `check` fails, found with about log2(len(passes)) runs on copies.

    `check` must hold before the first pass, and once it fails it must go on failing.

    Returns:
        The pass's name; None when `check` holds after all passes.

    Raises:
        ConfigError: `check` fails before the first pass.
    """

    def holds(count: int) -> bool:
        copy = graph.copy()
        PassManager(passes[:count], verify=False).run(copy)
        return check(copy)

    if not holds(0):
        raise ConfigError("the check fails before the first pass", fix="check the graph before the passes run")
    if holds(len(passes)):
        return None
    good, bad = 0, len(passes)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return passes[bad - 1].name
