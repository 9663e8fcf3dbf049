"""The plot of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_training(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Loss and accuracy over optimizer steps; False, and no file, without matplotlib or without two epochs' rows."""
    rows = [row for row in rows if row.get("event") == "epoch"]
    try:
        import matplotlib
    except ImportError:
        return False
    if not rows:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(9, 3.5))
    for axes, names, label in (
        (losses, ("train_loss", "validation_loss"), "loss"),
        (accuracies, ("top1", "top5"), "accuracy"),
    ):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True
