"""The published topology table: SpikingJelly's own trainer and evaluator and snnpart in turn, on the GPUs there are.

    python tools/bench/topology_table.py --plan                     the rows, their GPUs, and about how long they take
    python tools/bench/topology_table.py                            every row that this machine has GPUs for
    python tools/bench/topology_table.py --only table --only scaling
    python tools/bench/topology_table.py --points "PP2 G=32"        rows whose name holds the text
    python tools/bench/topology_table.py --images path/to/imagenet  evaluate on a folder's images (default: digits)
    python tools/bench/topology_table.py --plot                     only draw the plots

Each measurement is a process (group) of its own with 10 steps of warm-up and 50 measured ones, the peer and ours in
turn, `--repeats` times. Rows are written as they are measured; a run that was interrupted goes on where it was, rows
there are already are kept unless `--again` is given. `topology_points.py` says what the sections are. Writes
docs/results/topology_table.csv and its plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.rows import read  # noqa: E402
from tools.bench.topology_language import language_cases, language_sweeps  # noqa: E402
from tools.bench.topology_plan import plan  # noqa: E402
from tools.bench.topology_plot import plot  # noqa: E402
from tools.bench.topology_points import SECTIONS, Case, Settings, Sweep, scaling, table, vision_sweep  # noqa: E402
from tools.bench.topology_rows import NAME, Results, not_run, rows_of, write  # noqa: E402
from tools.bench.topology_scaling import with_scaling  # noqa: E402
from tools.bench.topology_sweep import due, result  # noqa: E402
from tools.bench.vision_rows import command_of, in_turn, turns  # noqa: E402

TARGET = ROOT / f"docs/results/{NAME}.csv"


@dataclass
class Table:
    """The rows so far, and the file they are written to after every case."""

    asked: argparse.Namespace
    target: Path | None
    order: Sequence[str]
    rows: list[Mapping[str, Any]] = field(default_factory=list)

    def run(self, item: Case | Sweep) -> None:
        """Measure what it lacks; where there are too few GPUs its rows stand as not-run, unless they are there."""
        enough = item.gpus <= self.asked.gpus
        if self.asked.again and enough:
            self.rows = [row for row in self.rows if not belongs(row, item)]
        if done(self.rows, item):
            return
        if not enough:
            case = item.case(item.first) if isinstance(item, Sweep) else item
            self.put(item.name, not_run(case, item.name))
        elif isinstance(item, Sweep):
            self.search(item)
        else:
            self.put(item.name, rows_of(item, self.measured(item, list(item.sides))))

    def search(self, sweep: Sweep) -> None:
        """Go on with a sweep from the batches that have rows to its end."""
        while (following := due(sweep, self.rows, self.asked.largest)) is not None:
            case, sides = following
            self.put(case.name, rows_of(case, self.measured(case, sides)))
        self.put(sweep.name, result(sweep, self.rows))

    def measured(self, case: Case, sides: Sequence[str]) -> Results:
        steps = ["--warm", "2", "--steps", "3"] if self.asked.quick else ["--warm", "10", "--steps", "50"]
        commands = {}
        for side in sides:
            script, *options = case.sides[side]
            commands[side] = command_of(script, case.gpus, [*options, *steps])
        processes = turns([command for _ in range(self.asked.repeats) for command in commands.values()])
        try:
            return in_turn(processes, commands, self.asked.repeats, self.asked.time_limit)
        finally:
            processes.close()

    def put(self, name: str, found: Sequence[Mapping[str, Any]]) -> None:
        """Rows of one case, in the place of earlier ones of its name."""
        for row in found:
            print("{point}: {metric} peer {peer} ours {ours} ratio {ratio} {status} {note}".format(**row), flush=True)
        self.rows = with_scaling([row for row in self.rows if row["point"] != name] + list(found))
        if self.target is not None:
            write(self.target, self.rows, self.order)


def items(settings: Settings) -> dict[str, list[Case] | list[Sweep]]:
    """Everything that can be measured, by section."""
    return {
        "table": list(table(settings)),
        "scaling": list(scaling(settings)),
        "train-sweep": list(vision_sweep(False, settings)),
        "eval-sweep": list(vision_sweep(True, settings)),
        "spikelm": list(language_cases(settings)),
        "spikelm-sweep": list(language_sweeps(settings)),
    }


def belongs(row: Mapping[str, Any], item: Case | Sweep) -> bool:
    batches = isinstance(item, Sweep) and row["point"].startswith(f"{item.prefix} G=")
    return bool(row["point"] == item.name or batches)


def done(rows: Sequence[Mapping[str, Any]], item: Case | Sweep) -> bool:
    return any(row["point"] == item.name and row["status"] != "not-run" for row in rows)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", action="append", choices=SECTIONS, help="sections to measure (may be repeated); default all")
    add("--points", action="append", default=[], help="only rows whose name holds this (may be repeated)")
    add("--repeats", type=int, default=3, help="processes of each side, in turn")
    add("--time-limit", type=float, default=300.0, help="seconds for one measurement")
    add("--again", action="store_true", help="measure rows that are there already")
    add("--gpus", type=int, help="use this many GPUs (or processes on the CPU) at most; default: all")
    add("--images", default="digits", help="what evaluations read: a data source of snnpart.vision, a folder, a file")
    add("--random", action="store_true", help="evaluate on random images, for a smoke run")
    add("--first", type=int, default=32, help="images of one rank with which sweeps begin")
    add("--largest", type=int, help="sweeps try no batch of one rank beyond this")
    add("--spikingjelly", help="checkout of SpikingJelly 2.0.0, whose benchmark/ holds its language model")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: ours alone, over gloo, for a smoke run")
    add("--quick", action="store_true", help="32x32 random images, few steps, one repeat; writes only to --output")
    add("--output", type=Path, help=f"default {TARGET.relative_to(ROOT)}")
    add("--plan", action="store_true", help="print what would be measured, and about how long it takes")
    add("--plot", action="store_true", help="only draw the plots")
    asked = parser.parse_args(words)
    if asked.quick:
        asked.repeats, asked.random, asked.largest = 1, True, asked.largest or 48
    if asked.gpus is None:
        asked.gpus = torch.cuda.device_count() if asked.device == "cuda" else 1
    return asked


def main() -> int:
    asked = arguments()
    smoke = asked.quick or asked.random or asked.device == "cpu"
    target = asked.output or (None if smoke else TARGET)
    settings = Settings(
        None if asked.random else asked.images, asked.device, asked.quick, asked.spikingjelly, asked.first
    )
    found = items(settings)
    every = [item for section in SECTIONS for item in found[section]]
    chosen = [item for section in asked.only or SECTIONS for item in found[section]]
    chosen = [item for item in chosen if not asked.points or any(text in item.name for text in asked.points)]
    runner = Table(asked, target, [item.name for item in every], list(read(target)) if target is not None else [])
    if asked.plan:
        left = [item for item in chosen if asked.again or not done(runner.rows, item)]
        print(plan(chosen, left, asked))
        return 0
    for item in () if asked.plot else chosen:
        runner.run(item)
    if target is not None:
        plot(runner.rows, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
