"""Rows of the benchmarks' results: their columns, what is said of machine and versions, and the CSV they stand in."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"
COLUMNS = (
    "bench", "point", "metric", "unit", "peer_name", "peer", "ours", "ratio", "repeats", "spread", "machine",
    "versions", "status", "note",
)  # fmt: skip
Row = dict[str, Any]


def row(bench: str, point: str, metric: str, unit: str, **values: Any) -> Row:
    """A row in the columns' order; what is not said is empty, repeats 1, status ok, this machine's cores and versions.

    Raises:
        KeyError: a value for no column.
    """
    usual = {"repeats": 1, "status": "ok", "machine": cores(), "versions": versions()}
    entry: Row = {**usual, **values, "bench": bench, "point": point, "metric": metric, "unit": unit}
    unknown = set(entry) - set(COLUMNS)
    if unknown:
        raise KeyError(f"no columns: {sorted(unknown)}")
    return {column: entry.get(column, "") for column in COLUMNS}


def cores() -> str:
    """This machine's processor, as `2 cores x86_64`."""
    return f"{os.cpu_count()} cores {platform.machine()}"


def gpus() -> str:
    """This machine's GPUs, as `2 x NVIDIA H200`; its processor where there are none."""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else cores()


def versions(*packages: str) -> str:
    """torch's version and those of the packages, else Python's."""
    rest = [f"{name} {version(name)}" for name in packages] or [f"python {platform.python_version()}"]
    return ", ".join([f"torch {torch.__version__}", *rest])


def read(path: Path) -> list[Row]:
    """The rows of a CSV; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows as a CSV, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    with scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    scratch.replace(path)


def replaced(old: Sequence[Row], new: Sequence[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """The old rows whose key no new one has, and the new ones behind them."""
    measured = {key(one) for one in new}
    return [*(one for one in old if key(one) not in measured), *new]
