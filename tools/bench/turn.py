"""Measurements that take turns: the process of the next one starts while the present one measures, and waits.

Importing torch and a framework, and compiling, take the CPU for longer than a measurement takes the GPU. So the runner
starts a process ahead of its turn, and the process calls `wait_for_turn` when it has done all that it can do without a
GPU. It has its turn when the file named in the environment variable `BENCH_TURN` exists; without that variable at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TURN = "BENCH_TURN"
GRACE = 40.0
"""Seconds in which a launcher ends its ranks; torchrun gives them 30."""


def wait_for_turn() -> None:
    """Return when the runner says so; end when the runner is gone. Every rank of a measurement waits for itself."""
    turn = os.environ.get(TURN)
    while turn and not Path(turn).exists():
        if not Path(turn).parent.exists():
            raise SystemExit("the benchmark that this measurement belongs to has ended")
        time.sleep(0.01)


@dataclass
class Waiting:
    """A process (group) that has been started and waits for its turn."""

    process: subprocess.Popen[str]
    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Waiting:
        folder = tempfile.TemporaryDirectory()
        place = Path(folder.name)
        given = {**environment, TURN: str(place / "turn")}
        with (place / "out").open("w") as out, (place / "err").open("w") as err:
            process = subprocess.Popen(
                list(command), cwd=cwd, env=given, stdout=out, stderr=err, text=True, start_new_session=True
            )
        return cls(process, folder)

    def take_turn(self, limit: float) -> tuple[str, str]:
        """What it wrote to stdout and stderr in its turn; TimeoutExpired after `limit` seconds, and it is ended."""
        place = Path(self.folder.name)
        (place / "turn").touch()
        try:
            self.process.wait(limit)
            return (place / "out").read_text(encoding="utf-8"), (place / "err").read_text(encoding="utf-8")
        finally:
            self.end()

    def end(self) -> None:
        """End the process and those it started; nothing is left behind.

        torchrun starts its ranks in sessions of their own, which no signal to its group reaches: it must end them.
        """
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.folder.cleanup()


class Turns:
    """Runs commands in the order in which they are asked for, and starts what `coming` names ahead of its turn."""

    def __init__(self, coming: Sequence[Sequence[str]], environment: Mapping[str, str], cwd: Path) -> None:
        self._coming = [list(command) for command in coming]
        self._environment, self._cwd = environment, cwd
        self._ahead: tuple[list[str], Waiting] | None = None

    def run(self, command: Sequence[str], limit: float) -> tuple[str, str]:
        """stdout and stderr of one command. Commands of `coming` that were passed over are not run."""
        waiting = self._started(list(command))
        if self._coming:
            following = self._coming[0]
            self._ahead = (following, Waiting.start(following, self._environment, self._cwd))
        return waiting.take_turn(limit)

    def _started(self, command: list[str]) -> Waiting:
        if command in self._coming:
            del self._coming[: self._coming.index(command) + 1]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == command:
            return ahead[1]
        if ahead is not None:
            ahead[1].end()
        return Waiting.start(command, self._environment, self._cwd)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[1].end()
            self._ahead = None
