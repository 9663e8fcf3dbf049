"""Measurements in turn: started ahead, measured one at a time, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench.turn import TURN, Turns

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tools.bench.turn import wait_for_turn
name, folder = sys.argv[1], Path(sys.argv[2])
(folder / f"{{name}}-started").write_text(str(time.time()))
wait_for_turn()
begin = time.time()
time.sleep(0.5 if name != "stuck" else 60)
(folder / f"{{name}}-turn").write_text(f"{{begin}} {{time.time()}}")
print("done", name)
print("said", name, file=sys.stderr)
"""


@pytest.fixture
def command(tmp_path: Path):  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    return lambda name: [sys.executable, str(script), name, str(tmp_path)]


def test_the_next_one_starts_ahead_and_waits(tmp_path: Path, command) -> None:  # type: ignore[no-untyped-def]
    turns = Turns([command(name) for name in "abc"], os.environ, ROOT)
    for name in "ab":
        assert turns.run(command(name), 20) == (f"done {name}\n", f"said {name}\n")
    turns.close()
    times = {name: [float(x) for x in (tmp_path / f"{name}-turn").read_text().split()] for name in "ab"}
    assert float((tmp_path / "b-started").read_text()) < times["a"][1] <= times["b"][0]
    time.sleep(0.2)
    assert not (tmp_path / "c-turn").exists()  # it was ended while it waited


def test_a_command_that_was_passed_over_does_not_run(tmp_path: Path, command) -> None:  # type: ignore[no-untyped-def]
    turns = Turns([command(name) for name in "abc"], os.environ, ROOT)
    turns.run(command("a"), 20)
    assert turns.run(command("c"), 20)[0] == "done c\n"
    turns.close()
    assert not (tmp_path / "b-turn").exists()


def test_what_takes_too_long_is_ended(tmp_path: Path, command) -> None:  # type: ignore[no-untyped-def]
    turns = Turns([command("stuck"), command("a")], os.environ, ROOT)
    with pytest.raises(subprocess.TimeoutExpired):
        turns.run(command("stuck"), 1)
    assert turns.run(command("a"), 20)[0] == "done a\n"
    turns.close()
    assert not (tmp_path / "stuck-turn").exists()


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.all
def test_ranks_of_a_launcher_are_ended_with_it(tmp_path: Path) -> None:
    """torchrun starts its ranks in sessions of their own."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(120)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    turns = Turns([], os.environ, ROOT)
    with pytest.raises(subprocess.TimeoutExpired):
        turns.run([*launcher, str(script), str(tmp_path)], 12)
    ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert not any(alive(pid) for pid in ranks)


def test_who_waits_ends_when_the_runner_is_gone(tmp_path: Path, command) -> None:  # type: ignore[no-untyped-def]
    place = tmp_path / "place"
    place.mkdir()
    waiting = subprocess.Popen(command("a"), env={**os.environ, TURN: str(place / "turn")}, stderr=subprocess.PIPE)
    while not (tmp_path / "a-started").exists():
        time.sleep(0.05)
    place.rmdir()
    assert b"has ended" in waiting.communicate(timeout=20)[1] and waiting.returncode == 1
