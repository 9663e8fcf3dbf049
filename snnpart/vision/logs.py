"""What rank 0 tells while a run is under way: a line of JSON an epoch, progress, and files to look at later.

On a terminal a progress bar moves; elsewhere a plain line comes now and then. With a folder, every line also goes to
`metrics.jsonl` and `metrics.csv`, to TensorBoard if asked, and a plot of loss and accuracy is made at the end.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from snnpart.errors import ConfigError
from snnpart.runtime.ranks import Ranks

_SECONDS_BETWEEN_LINES = 10.0


class Log:
    """Lines of metrics of one run. On other ranks than 0 it says nothing.

    Args:
        folder: where the files go, or None.
        speaks: whether this is rank 0.
        tensorboard: also write TensorBoard files.
    """

    def __init__(self, folder: Path | None, speaks: bool, tensorboard: bool = False, out: TextIO | None = None) -> None:
        self._folder = folder if speaks else None
        self._speaks, self._out = speaks, out
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._board = _board(self._folder) if tensorboard and self._folder is not None else None

    def metrics(self, values: Mapping[str, Any]) -> None:
        """One line of JSON, and the same into the files."""
        if not self._speaks:
            return
        line = json.dumps(_rounded(values))
        print(line, file=self._out or sys.stdout, flush=True)
        if self._folder is not None:
            with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, values.get("step", 0))

    def say(self, text: str) -> None:
        """A line for people, on standard error, so that standard output stays JSON."""
        if self._speaks:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write the table and the plot from the lines of JSON."""
        if self._board is not None:
            self._board.close()
        rows = read_metrics(self._folder) if self._folder is not None else []
        if self._folder is not None and rows:
            _write_table(rows, self._folder / "metrics.csv")
            from snnpart.vision.plots import plot_training

            plot_training(rows, self._folder / "training.svg")


def open_log(ranks: Ranks, folder: Path | None, tensorboard: bool = False) -> Log:
    """The log of a run. Collective: ConfigError on every rank where rank 0 cannot write into the folder."""
    log, problem = Log(None, False), None
    try:
        log = Log(folder, ranks.rank == 0, tensorboard)
    except OSError as error:
        problem = ConfigError(f"log = {folder} cannot be written: {error.strerror}", fix="give another folder")
    except ConfigError as error:
        problem = error
    ranks.agree(problem)
    return log


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; of a step that was run again after an interruption, the later one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list({(row.get("event"), row.get("step")): row for row in rows}.values())


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}


def _write_table(rows: list[dict[str, Any]], path: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("tensorboard = true needs TensorBoard", fix="pip install tensorboard") from error
    return SummaryWriter(str(folder))  # type: ignore[no-untyped-call]


class Steps:
    """Progress over the steps of one pass: a bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, name: str, total: int, speaks: bool) -> None:
        self._name, self._total, self._done, self._speaks = name, total, 0, speaks
        self._last = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Steps:
        if self._speaks and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
        elif self._speaks and time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            print(f"{self._name}: step {self._done} of {self._total}", file=sys.stderr, flush=True)
