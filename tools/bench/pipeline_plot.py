"""Draws docs/results/pipeline.csv: balance of the stages, and bubbles predicted and measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any


def plot(path: Path) -> Path:
    """The figure beside the CSV."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "snnpart"
    import matplotlib.pyplot as plt

    with path.open(encoding="utf-8") as file:
        table = [line for line in csv.DictReader(file) if line["ours"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    _balance(left, _values(table, "balance measured"), _values(table, "balance measured, built-in profile"))
    _bubbles(right, _values(table, "bubble predicted"), _values(table, "bubble measured"))
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    return target


def _values(table: list[dict[str, str]], metric: str) -> dict[str, float]:
    return {line["point"]: float(line["ours"]) for line in table if line["metric"] == metric}


def _balance(axes: Any, measured: dict[str, float], builtin: dict[str, float]) -> None:
    places = range(len(measured))
    axes.bar([i - 0.2 for i in places], [builtin.get(point, 0.0) for point in measured], 0.4, label="built-in profile")
    axes.bar([i + 0.2 for i in places], list(measured.values()), 0.4, label="measured profile")
    axes.axhline(1.1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(list(places), list(measured), rotation=60, ha="right", fontsize=7)
    axes.set(ylabel="slowest stage over the mean", ylim=(1.0, None))
    axes.legend()


def _bubbles(axes: Any, predicted: dict[str, float], measured: dict[str, float]) -> None:
    points = [point for point in predicted if point in measured]
    axes.plot([0, 0.6], [0, 0.6], color="black", linewidth=0.8, linestyle="--")
    for kind, marker in (("chain", "o"), ("sew_resnet34", "x")):
        own = [point for point in points if point.startswith(kind)]
        axes.scatter([predicted[p] for p in own], [measured[p] for p in own], marker=marker, label=kind)
        for point in own:
            axes.annotate(point.partition(" ")[2], (predicted[point], measured[point]), fontsize=6)
    axes.set(xlabel="bubble predicted", ylabel="bubble measured")
    axes.legend()
