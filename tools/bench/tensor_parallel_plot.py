"""The plot beside docs/results/tensor_parallel.csv: bytes against the peer, predicted against measured, images/s."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(path: Path) -> Path:
    """Draw the CSV as an SVG of the same name."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "snnpart"
    import matplotlib.pyplot as plt

    with path.open(encoding="utf-8", newline="") as file:
        table = [found for found in csv.DictReader(file) if found["status"] != "not-run"]
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    _bars(panels[0], [r for r in table if r["metric"].startswith("bytes sent")], "MB sent per rank and step")
    _scatter(panels[1], [r for r in table if r["metric"] == "predicted step time"])
    _bars(panels[2], [r for r in table if r["metric"] == "images per second"], "images/s")
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return target


def _bars(panel: Any, rows: Sequence[dict[str, str]], label: str) -> None:
    """Peer and ours beside each other, a pair of bars for each point."""
    places = range(len(rows))
    panel.barh([y - 0.2 for y in places], [float(r["peer"]) for r in rows], 0.4, label="SpikingJelly")
    panel.barh([y + 0.2 for y in places], [float(r["ours"]) for r in rows], 0.4, label="snnpart")
    panel.set_yticks(places, [r["point"].replace(", tp=", " tp") for r in rows], fontsize=6)
    panel.invert_yaxis()
    panel.set(xlabel=label)
    panel.legend(fontsize=7)


def _scatter(panel: Any, rows: Sequence[dict[str, str]]) -> None:
    """A dot for each plan of each point, and the diagonal on which the prediction would be right."""
    for plan in sorted({_plan(r) for r in rows}):
        chosen = [r for r in rows if _plan(r) == plan]
        panel.scatter([float(r["peer"]) for r in chosen], [float(r["ours"]) for r in chosen], s=14, label=plan)
    if rows:
        ends = [min(float(r["peer"]) for r in rows), max(float(r["peer"]) for r in rows)]
        panel.plot(ends, ends, color="gray", linewidth=0.8)
        panel.legend(fontsize=7, title="plan")
        panel.set(xscale="log", yscale="log")
    panel.set(xlabel="measured ms a step", ylabel="predicted ms a step")


def _plan(row: dict[str, str]) -> str:
    """The plan's name, which ends the point's; plans that came out alike are named by the first."""
    return row["point"].rpartition(", ")[2].split(" = ")[0]
