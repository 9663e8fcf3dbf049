"""How long `parallelize` takes: over the depth of a network, and over the number of time steps of a loop.

    python tools/bench/compile_time.py            SEW-ResNet 18 to 152, a snnTorch loop with T 5 to 1000
    python tools/bench/compile_time.py --quick    the two smallest points of each, once

Each point is the median of five compilations with tp=2, pp=2 and without the gate, after one that warms up imports.
Writes docs/results/compile_time.csv and, from it, the plot docs/results/compile_time.svg (--quick writes nothing unless
--output says where). There is no peer: no other tool makes this program from an unmodified module, so the columns of a
peer are empty.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import parallelize  # noqa: E402
from tools.bench import rows as results  # noqa: E402
from tools.bench.rows import Row, write  # noqa: E402

DEPTHS, STEPS = (18, 34, 50, 101, 152), (5, 10, 20, 50, 100, 1000)
LIMITS = {"sew_resnet34": 5.0, "sew_resnet152": 15.0, "snntorch_loop_T100": 15.0, "snntorch_loop_T1000": 30.0}
SLOPE_LIMIT = 1.15


@dataclass(frozen=True)
class Point:
    """A network to compile: its name in the table, its size on the x axis, and how it is made."""

    name: str
    series: str
    x: int
    make: Callable[[], tuple[nn.Module, Tensor, str | None]]


@dataclass(frozen=True)
class Measured:
    """Seconds of every repeat, and the median of the processor's seconds, which a busy machine changes less."""

    point: Point
    seconds: tuple[float, ...]
    processor: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def sew_resnet(depth: int) -> tuple[nn.Module, Tensor, str | None]:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import sew_resnet as zoo

    model = getattr(zoo, f"sew_resnet{depth}")(cnf="ADD", spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(model, "m")
    return model, torch.rand(4, 32, 3, 128, 128), "TNCHW"


class Loop(nn.Module):
    """Four layers of snnTorch neurons in a Python loop over T steps."""

    def __init__(self, steps: int) -> None:
        import snntorch as snn

        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.neurons = nn.ModuleList(snn.Leaky(beta=0.9) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mems = [neuron.init_leaky() for neuron in self.neurons]
        out = []
        for _ in range(self.steps):
            spikes = x
            for index, (linear, neuron) in enumerate(zip(self.linears, self.neurons, strict=True)):
                spikes, mems[index] = neuron(linear(spikes), mems[index])
            out.append(spikes)
        return torch.stack(out)


def snntorch_loop(steps: int) -> tuple[nn.Module, Tensor, str | None]:
    return Loop(steps), torch.rand(32, 64), None


def points(quick: bool) -> list[Point]:
    """All points, or the two smallest of each series."""
    depths, steps = (DEPTHS[:2], STEPS[:2]) if quick else (DEPTHS, STEPS)
    nets = [Point(f"sew_resnet{d}", "depth", d, lambda d=d: sew_resnet(d)) for d in depths]  # type: ignore[misc]
    loops = [Point(f"snntorch_loop_T{t}", "T", t, lambda t=t: snntorch_loop(t)) for t in steps]  # type: ignore[misc]
    return nets + loops


def measure(point: Point, repeats: int) -> Measured:
    """Compile the same model `repeats` times."""
    model, example, layout = point.make()
    seconds, processor = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        parallelize(model, example_inputs=example, input_layout=layout, tp=2, pp=2, verify="off")
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return Measured(point, tuple(seconds), statistics.median(processor))


def slope(measured: Iterable[Measured]) -> float:
    """Least squares slope of log seconds over log x."""
    pairs = [(math.log(m.point.x), math.log(m.median)) for m in measured]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / sum((x - mean_x) ** 2 for x, _ in pairs)


def rows(measured: list[Measured], quick: bool) -> list[dict[str, Any]]:
    """Rows of the table: the points, then the slopes; a missed limit is a failed row."""
    found = [row(m.point.name, "seconds", "s", m.median, LIMITS.get(m.point.name), m) for m in measured]
    found += [row(m.point.name, "processor seconds", "s", m.processor, None, m) for m in measured]
    for series in ("depth", "T"):
        members = [m for m in measured if m.point.series == series]
        limit = None if quick else SLOPE_LIMIT
        found.append(row(f"slope_over_{series}", "log-log slope", "1", slope(members), limit, members[0]))
    return found


def row(point: str, metric: str, unit: str, ours: float, limit: float | None, measured: Measured) -> Row:
    return results.row(
        "compile_time",
        point,
        metric,
        unit,
        ours=f"{ours:.4g}",
        repeats=len(measured.seconds),
        spread=f"{measured.spread:.2f}" if metric == "seconds" else "",
        status="ok" if limit is None or ours <= limit else "failed",
        note="" if limit is None else f"limit {limit:g}",
    )


def plot(path: Path) -> Path:
    """Draw the CSV: seconds over depth and over T, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "snnpart"
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    with path.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for panel, (prefix, label) in zip(panels, (("sew_resnet", "depth"), ("snntorch_loop_T", "T")), strict=True):
        points_of = [r for r in table if r["point"].startswith(prefix) and r["metric"] == "seconds"]
        chosen = [(int(r["point"].removeprefix(prefix)), float(r["ours"])) for r in points_of]
        steepness = next(float(r["ours"]) for r in table if r["point"] == f"slope_over_{label}")
        panel.loglog(*zip(*chosen, strict=True), marker="o")
        panel.set(xlabel=label, ylabel="seconds", title=f"{prefix.rstrip('_T')}: slope {steepness:.2f}")
        panel.set_xticks([x for x, _ in chosen], [str(x) for x, _ in chosen])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="both", alpha=0.3)
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the two smallest points of each series, once")
    parser.add_argument(
        "--output", type=Path, help="CSV to write; default docs/results/compile_time.csv (not with --quick)"
    )
    options = parser.parse_args()
    repeats = 1 if options.quick else 5
    measured = []
    for point in points(options.quick):
        if not measured:
            measure(point, 1)
        measured.append(measure(point, repeats))
        print(
            f"{point.name}: {measured[-1].median:.2f} s ({measured[-1].processor:.2f} s of the processor)", flush=True
        )
    table = rows(measured, options.quick)
    for entry in table[2 * len(measured) :]:
        print(f"{entry['point']}: {entry['ours']}")
    output = options.output or (None if options.quick else ROOT / "docs/results/compile_time.csv")
    if output is not None:
        write(output, table)
        print(f"wrote {output} and {plot(output)}")
    missed = [entry["point"] for entry in table if entry["status"] != "ok"]
    if missed:
        print(f"limits missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
