"""Rows of the vision benchmarks: measurements in processes of their own, the peer's and ours in turn, and their CSV."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench import rows as results  # noqa: E402
from tools.bench.rows import Row, gpus, read, versions, write  # noqa: E402
from tools.bench.turn import Turns  # noqa: E402
from tools.bench.vision_points import TOPOLOGIES, Point  # noqa: E402

RATE, MEMORY = "images_per_second", "peak_memory_bytes"


@dataclass(frozen=True)
class Bench:
    """A benchmark: its name, its points, the options that both sides' scripts get, and the scripts, ours first."""

    name: str
    points: Callable[[], Iterable[Point]]
    options: tuple[str, ...] = ()
    peer: str = "SpikingJelly {mode}"
    scripts: tuple[tuple[str, ...], tuple[str, ...]] = (("vision_ours.py",), ("vision_peer.py",))

    @property
    def target(self) -> Path:
        return ROOT / "docs/results" / f"{self.name}.csv"


class NotMeasured(Exception):
    """A process that gave no result; the text says why."""


def command_of(script: str, gpus: int, options: Sequence[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    return [*launcher, str(ROOT / "tools/bench" / script), *options]


def turns(commands: Sequence[Sequence[str]]) -> Turns:
    """Their processes, to be closed; a runner that is told to end (`timeout` does) leaves by its `finally` too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    return Turns(commands, environment, ROOT)


def measure(processes: Turns, command: Sequence[str], limit: float) -> dict[str, Any]:
    """One measurement in processes of its own."""
    try:
        out, err = processes.run(command, limit)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"no result in {limit:.0f} s") from None
    for line in out.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    lines = err.splitlines()
    memory = [line for line in lines if "out of memory" in line]  # of one rank; the others then fail of its absence
    errors = [line for line in lines if "Error" in line]
    raise NotMeasured((memory or errors or lines or ["no output"])[0][:200])


def commands(bench: Bench, point: Point, steps: Sequence[str]) -> dict[str, list[str]]:
    """The command of ours ("ours") and of each mode of the peer."""
    arguments = dict(TOPOLOGIES[point.topology].peers)
    sides = {"ours": bench.scripts[0], **{mode: (*bench.scripts[1], *arguments[mode]) for mode, _ in point.least}}
    return {
        side: command_of(script, point.gpus, [*point.options(side == "ours"), *extra, *bench.options, *steps])
        for side, (script, *extra) in sides.items()
    }


def in_turn(
    processes: Turns, sides: Mapping[str, Sequence[str]], repeats: int, limit: float
) -> dict[str, list[dict[str, Any]] | str]:
    """Results of each side, one after the other; where one failed, why."""
    found: dict[str, Any] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, command in sides.items():
            if isinstance(found[side], str):
                continue
            try:
                found[side].append(measure(processes, command, limit))
                print(f"  {side}: {json.dumps(found[side][-1])}", flush=True)
            except NotMeasured as error:
                found[side] = f"{side}: {error}"
    return found


def rows_of(bench: Bench, point: Point, found: Mapping[str, list[dict[str, Any]] | str]) -> list[dict[str, Any]]:
    """The rows of one point: throughput against each mode of the peer, and memory against its best one."""
    ours, rows = found["ours"], []
    for number, (mode, least) in enumerate(point.least):
        peer = found[mode]
        if isinstance(peer, str) or isinstance(ours, str):
            why = "; ".join(x for x in (peer, ours) if isinstance(x, str))
            rows.append({**blank(bench, point, mode), "status": "failed", "note": why})
            continue
        rows.append(compared(bench, point, mode, RATE, rates(peer), rates(ours), least))
        if number == 0:
            memory = [[result[MEMORY] / 2**30 for result in side] for side in (peer, ours)]
            rows.append(compared(bench, point, mode, MEMORY, *memory, 1 / point.memory if point.memory else 0.0))
    return rows


def rates(results: Sequence[dict[str, Any]]) -> list[float]:
    """Images/s of every round of every repeat."""
    return [rate for result in results for rate in result.get("rounds") or [result[RATE]]]


def compared(
    bench: Bench, point: Point, mode: str, metric: str, peer: Sequence[float], ours: Sequence[float], least: float
) -> dict[str, Any]:
    """One row; `least` 0 asks for nothing."""
    middle, theirs = statistics.median(ours), statistics.median(peer)
    ratio = middle / theirs if metric == RATE else theirs / middle
    unit = "images/s" if metric == RATE else "GiB"
    return {
        **blank(bench, point, mode),
        "metric": metric if metric == RATE else "peak memory reserved",
        "unit": unit,
        "peer": f"{theirs:.5g}",
        "ours": f"{middle:.5g}",
        "ratio": f"{ratio:.3g}",
        "repeats": len(ours),
        "spread": f"{(max(ours) - min(ours)) / middle:.3f}",
        "status": "ok" if ratio >= least else "failed",
        "note": "" if ratio >= least else f"less than {least:.3g} times",
    }


def blank(bench: Bench, point: Point, mode: str) -> Row:
    said = {"peer_name": bench.peer.format(mode=mode), "machine": gpus(), "versions": versions("spikingjelly")}
    return results.row(bench.name, point.name, RATE, "images/s", repeats="", status="", **said)


def not_run(bench: Bench, point: Point) -> list[dict[str, Any]]:
    command = f'python tools/bench/{bench.name}.py --points "{point.name}"'
    note = f"needs {point.gpus} GPU{'s' * (point.gpus > 1)}; {command}"
    empty = {"status": "not-run", "note": note, "machine": "", "versions": ""}
    return [{**blank(bench, point, mode), **empty} for mode, _ in point.least]


def ordered(bench: Bench, rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of the benchmark's points."""
    order = {point.name: i for i, point in enumerate(bench.points())}
    return sorted(rows, key=lambda row: order.get(row["point"], len(order)))


def plot(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Throughput against memory, the peer and ours, one panel a network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = sorted({row["point"].split()[0] for row in rows if row["ours"]})
    figure, axes = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        own = [row for row in rows if row["point"].startswith(model + " ") and row["ours"]]
        memory = {row["point"]: row for row in own if row["unit"] == "GiB"}
        rates = [row for row in own if row["unit"] == "images/s" and row["point"] in memory]
        for side, marker in (("peer", "o"), ("ours", "^")):
            first = {row["point"]: row for row in reversed(rates)}
            found = [(float(memory[name][side]), float(row[side]), name) for name, row in first.items()]
            axis.scatter([x for x, _, _ in found], [y for _, y, _ in found], marker=marker, label=side)
            for x, y, name in found:
                axis.annotate(name.removeprefix(model + " "), (x, y), fontsize=6)
        axis.set(xscale="log", yscale="log", xlabel="peak memory reserved, GiB", ylabel="images/s", title=model)
        axis.legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def steps_of(asked: argparse.Namespace) -> list[str]:
    return ["--rounds", str(asked.rounds), *(["--warm", "5", "--steps", "3"] if asked.quick else [])]


def chosen(bench: Bench, asked: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[Point]:
    """The points that are asked for and have no row, or all that are asked for with `--again`."""
    done = {row["point"] for row in rows if row["status"] in ("ok", "failed")}
    named = [p for p in bench.points() if not asked.points or any(text in p.name for text in asked.points)]
    points = [point for point in named if asked.again or point.name not in done]
    return [replace(point, size=32) for point in points] if asked.quick else points


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", action="append", default=[], help="only points whose name holds this")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side, in turn")
    parser.add_argument("--rounds", type=int, default=1, help="times that each process measures its 40 steps")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for one measurement")
    parser.add_argument("--again", action="store_true", help="measure points that have rows already")
    parser.add_argument("--quick", action="store_true", help="small images and few steps; writes only to --output")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", action="store_true", help="only draw the plot")
    return parser.parse_args()


def main(bench: Bench, description: str) -> int:
    asked = arguments(description)
    target = asked.output or (None if asked.quick else bench.target)
    rows = read(target) if target is not None else []
    points = [] if asked.plot else chosen(bench, asked, rows)
    runnable = [point for point in points if point.gpus <= torch.cuda.device_count()]
    for point in points:
        known = any(row["point"] == point.name and row["status"] in ("ok", "failed") for row in rows)
        if point not in runnable and not known:
            rows = put(bench, target, rows, point, not_run(bench, point))
    sides = {point: commands(bench, point, steps_of(asked)) for point in runnable}
    processes = turns([c for point in runnable for _ in range(asked.repeats) for c in sides[point].values()])
    try:
        for point in runnable:
            found = in_turn(processes, sides[point], asked.repeats, asked.time_limit)
            rows = put(bench, target, rows, point, rows_of(bench, point, found))
    finally:
        processes.close()
    if target is not None and any(row["ours"] for row in rows):
        plot(rows, target.with_suffix(".svg"))
    return 0


def put(
    bench: Bench, target: Path | None, rows: Sequence[dict[str, Any]], point: Point, found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All rows with those of one point in the place of its earlier ones; printed and written."""
    for row in found:
        print("{point}: {metric} peer {peer} ours {ours} ratio {ratio} {status} {note}".format(**row), flush=True)
    kept = [row for row in rows if row["point"] != point.name] + found
    if target is not None:
        write(target, ordered(bench, kept))
    return kept
