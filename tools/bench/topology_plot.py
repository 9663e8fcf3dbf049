"""Draws docs/results/topology_table.csv: throughput by topology, against peak memory, and against the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.topology_points import PER_SECOND

Rows = Sequence[Mapping[str, Any]]
SIDES = {"peer": "--", "ours": "-"}
MARKERS = "os^DPv"
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False}


def plot(rows: Rows, csv: Path) -> list[Path]:
    """The figures beside the CSV that there are rows for."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "snnpart"
    measured = [row for row in rows if row["peer"] or row["ours"]]
    made = [by_topology(measured, csv.with_suffix(".svg"))]
    for word in ("memory", "batch"):
        made.append(against(measured, word == "memory", csv.with_name(f"{csv.stem}-{word}.svg")))
    return [path for path in made if path is not None]


def by_topology(rows: Rows, target: Path) -> Path | None:
    """Bars of the fixed batch, a panel a network; of the peer's modes the fastest one."""
    rates = [row for row in rows if row["unit"] in PER_SECOND.values() and _section(row) in ("table", "spikelm")]
    networks = list(dict.fromkeys(_words(row)[1] for row in rates))
    if not networks:
        return None
    figure, panels = _panels(len(networks))
    for axes, network in zip(panels, networks, strict=True):
        own = [row for row in rates if _words(row)[1] == network]
        topologies = list(dict.fromkeys(_words(row)[2] for row in own))
        heights = {side: [_best(own, topology, side) for topology in topologies] for side in SIDES}
        for place, side in enumerate(SIDES):
            axes.bar([i + 0.4 * place - 0.2 for i in range(len(topologies))], heights[side], 0.4, label=side)
        axes.set_xticks(range(len(topologies)), topologies, rotation=60, ha="right", fontsize=7)
        axes.set(yscale="log", ylabel=own[0]["unit"], title=f"{network}, {_words(own[0])[3]}")
        axes.set_ylim(bottom=0.5 * min(height for side in SIDES for height in heights[side] if height))
        axes.legend(**BESIDE)
    figure.savefig(target, metadata={"Date": None})
    return target


def against(rows: Rows, memory: bool, target: Path) -> Path | None:
    """Throughput of the sweeps, a panel a section and network, a line a topology and side, its largest batch named."""
    swept = [row for row in rows if _section(row).endswith("sweep") and "G=" in row["point"]]
    panels = list(dict.fromkeys(tuple(_words(row)[:2]) for row in swept))
    if not panels:
        return None
    figure, drawn = _panels(len(panels))
    for axes, (section, network) in zip(drawn, panels, strict=True):
        own = [row for row in swept if _words(row)[:2] == [section, network]]
        for number, topology in enumerate(dict.fromkeys(_words(row)[2] for row in own)):
            for side, style in SIDES.items():
                line = _line([row for row in own if _words(row)[2] == topology], side, memory)
                _draw(axes, line, f"{topology} {side}", style, number)
        unit = next(row["unit"] for row in own if row["unit"] != "GiB")
        across = "peak memory reserved on a GPU, GiB" if memory else "global batch"
        axes.set(xscale="log", yscale="log", xlabel=across, ylabel=unit, title=f"{network}, {section}")
        axes.legend(fontsize=6, **BESIDE)
    figure.savefig(target, metadata={"Date": None})
    return target


def _line(rows: Rows, side: str, memory: bool) -> list[tuple[float, float, str]]:
    """(memory or batch, throughput, name of the batch) of one side, by batch; of the peer in its fastest mode."""
    rates: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        better = row["point"] not in rates or float(row[side] or 0) > float(rates[row["point"]][side])
        if row["unit"] != "GiB" and row[side] and better:
            rates[row["point"]] = row
    sizes = {(row["point"], row["peer_name"]): row[side] for row in rows if row["unit"] == "GiB" and row[side]}
    line = []
    for point, row in sorted(rates.items(), key=lambda item: _batch(item[0])):
        across = float(sizes.get((point, row["peer_name"]), 0)) if memory else _batch(point)
        line.append((across, float(row[side]), f"G={_batch(point)}"))
    return [place for place in line if place[0] > 0]


def _draw(axes: Any, line: Sequence[tuple[float, float, str]], label: str, style: str, number: int) -> None:
    if not line:
        return
    across, up, names = zip(*line, strict=True)
    axes.plot(across, up, style, color=f"C{number}", marker=MARKERS[number % len(MARKERS)], markersize=4, label=label)
    axes.annotate(names[-1], (across[-1], up[-1]), fontsize=6, color=f"C{number}")


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib import pyplot

    columns = min(count, 2)
    lines = -(-count // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6 * columns, 4.4 * lines), squeeze=False, layout="constrained"
    )
    for unused in axes.flat[count:]:
        unused.axis("off")
    return figure, axes.flat[:count]


def _best(rows: Rows, topology: str, side: str) -> float:
    return max((float(row[side]) for row in rows if _words(row)[2] == topology and row[side]), default=0.0)


def _words(row: Mapping[str, Any]) -> list[str]:
    """Section, network, topology and batch."""
    return str(row["point"]).split()


def _section(row: Mapping[str, Any]) -> str:
    return _words(row)[0]


def _batch(point: str) -> int:
    return int(point.rpartition("=")[2])
