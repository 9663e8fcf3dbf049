"""Who is named for a wait in vain, as one rank sees it. Real ranks: tests/distributed/test_heartbeat.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snnpart.errors import ConfigError, LaunchError
from snnpart.mesh import Mesh
from snnpart.runtime.collectives import Axis
from snnpart.runtime.heartbeat import Heartbeat
from snnpart.runtime.ranks import Ranks


class FirstOfTwo(Heartbeat):
    """Rank 0 of a pipeline of two; nobody else is there."""

    def __init__(self, end: Callable[[str], None] | None = None) -> None:
        alone = Axis(None, 0, (0, 1))
        super().__init__(Ranks(0, Mesh(1, 2, 1), torch.device("cpu"), {}, alone), timedelta(seconds=1), end)
        self._silence = 1.5

    def _connect(self) -> dist.TCPStore:
        return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def hear(self, count: int, operation: str = "receiving, stage 1", seconds: float = 0.0) -> None:
        """A beat of rank 1, which waits for us as far as it has said."""
        assert self._store is not None
        self._store.set("beat1", json.dumps({"count": count, "operation": operation, "seconds": seconds}))


def test_a_wait_for_the_device_is_given_up_sooner_when_a_rank_has_failed() -> None:
    """A kernel that waits for another rank cannot be woken; a wait on the host is, and is not counted here. A wait that
    began long before the failure has as long as any other."""
    heartbeat = FirstOfTwo()
    heartbeat._stop.set()  # its thread looks on no more: the test does
    heartbeat._thread.join()
    heartbeat._timeout = 600.0

    def overdue(operation: str, inside: float) -> bool:
        with heartbeat.within(operation):
            heartbeat._since = time.monotonic() - inside
            return heartbeat._is_overdue()

    device, host = "waiting for the device, in a captured step", "receiving, stage 0"
    assert not overdue(device, 899.0) and overdue(device, 901.0)
    assert heartbeat._store is not None
    heartbeat._store.set("failed", "1 the loss, stage 1: ValueError: no such loss")
    heartbeat._wake()
    assert not overdue(device, 899.0)
    assert heartbeat._doomed_at is not None
    heartbeat._doomed_at -= 31.0
    assert overdue(device, 31.0) and not overdue(device, 29.0)
    assert not overdue(host, 899.0) and overdue(host, 901.0)
    assert not heartbeat._is_overdue()
    heartbeat._silence = 0.0  # nobody else will leave
    heartbeat.close()


def raised(heartbeat: FirstOfTwo, error: Exception, shared: bool) -> tuple[Exception, bool]:
    """What comes out of a guard in which the error is raised, and whether the other rank is told."""
    with pytest.raises(Exception) as found, heartbeat.guard("reducing", "stage 0", shared=shared):
        raise error
    assert heartbeat._store is not None
    return found.value, heartbeat._store.check(["failed"])


def agreed(error: Exception) -> Exception:
    """The error as `Ranks.agree` raises it."""
    alone = Ranks(0, Mesh(1, 1, 1), torch.device("cpu"), {}, Axis(None, 0, (0,)))
    with pytest.raises(type(error)) as found:
        alone.agree(error)
    return found.value


@pytest.mark.parametrize(
    ("error", "shared", "breaks"),
    [
        (ValueError("of one rank"), False, True),
        (ValueError("out of memory"), True, True),
        (ConfigError("of one rank"), False, True),
        (ConfigError("of all ranks"), True, False),
        (agreed(ValueError("of all ranks")), True, False),
        (agreed(ConfigError("of all ranks")), False, False),
    ],
)
def test_what_the_others_are_told_breaks_the_program_and_nothing_else_does(
    error: Exception, shared: bool, breaks: bool
) -> None:
    """What is told is never taken back: told of a program that goes on, it would break the others later."""
    heartbeat = FirstOfTwo()
    try:
        with heartbeat.attempt():
            assert raised(heartbeat, error, shared) == (error, False)
        assert not heartbeat.broken
        assert raised(heartbeat, error, shared) == (error, breaks)
        assert heartbeat.broken == breaks
    finally:
        heartbeat._silence = 0.0  # nobody else will leave
        heartbeat.close()


def test_a_rank_that_lost_another_must_be_launched_again() -> None:
    heartbeat = FirstOfTwo()
    heartbeat.hear(1, "the loss, stage 1", 60.0)
    lost, told = raised(heartbeat, dist.DistNetworkError("Connection reset by peer"), shared=True)
    assert isinstance(lost, LaunchError) and "is in the loss, stage 1 for 60 s" in str(lost)
    assert heartbeat.broken and not told
    heartbeat._silence = 0.0  # nobody else will leave
    heartbeat.close()


def test_a_rank_is_named_whose_last_beat_is_seen_late() -> None:
    """A busy machine holds our own thread up: it sees the beat when the connection has long been broken."""
    heartbeat = FirstOfTwo()
    heartbeat.hear(1)
    late = threading.Timer(1.3, heartbeat.hear, (2,))
    late.start()
    reason = heartbeat.reason()
    late.join()
    heartbeat._silence = 0.0  # nobody else will leave
    heartbeat.close()
    assert reason.startswith("rank 1 (dp 0, pp 1, tp 0) stopped answering"), reason
    assert reason.endswith("in receiving, stage 1")


def test_a_rank_says_where_it_is_at_once() -> None:
    """Others can name a rank that dies before its first interval is over."""

    class Slow(FirstOfTwo):
        def _connect(self) -> dist.TCPStore:
            self._interval = 600.0
            return super()._connect()

    heartbeat = Slow()
    assert heartbeat._store is not None
    patience = time.monotonic() + 20.0
    while not heartbeat._store.check(["beat0"]) and time.monotonic() < patience:
        time.sleep(0.01)  # not `wait`, which keeps the thread from its store
    assert heartbeat._store.check(["beat0"])
    heartbeat._silence = 0.0  # nobody else will leave
    heartbeat.close()


def test_a_process_is_ended_by_one_operation_that_lasts_beyond_the_timeout_not_by_several() -> None:
    """The main thread cannot be woken; the reason says where it is, and who is to blame."""
    reasons: list[str] = []
    ended = threading.Event()

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    heartbeat = FirstOfTwo(end)
    heartbeat._silence = 60.0  # rank 1 speaks once
    heartbeat.hear(1, "the loss, stage 1, microbatch 2", 0.7)
    for microbatch in range(4):
        with heartbeat.within(f"sending, stage 0, microbatch {microbatch}"):
            time.sleep(0.5)
    assert not reasons  # two seconds, of which none was in one operation for 1.5
    with heartbeat.within("agreeing on the batch, start of a step"):
        assert ended.wait(20)
    heartbeat._silence = 0.0  # nobody else will leave
    heartbeat.close()
    (reason,) = reasons
    here = r"rank 0 \(dp 0, pp 0, tp 0\) is in agreeing on the batch, start of a step for \d+ s"
    assert re.fullmatch(here + r"\. rank 1 \(dp 0, pp 1, tp 0\) is in the loss, stage 1, microbatch 2 for 1 s", reason)


def test_an_ended_process_has_said_why() -> None:
    """A process of its own, whose main thread sleeps on."""
    script = (
        "import time\n"
        "from tests.runtime.test_heartbeat import FirstOfTwo\n"
        "heartbeat = FirstOfTwo()\n"
        "heartbeat._silence = 60.0\n"
        "heartbeat.hear(1, 'the loss, stage 1', 0.7)\n"
        "with heartbeat.within('the loss, stage 0'):\n"
        "    time.sleep(90)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=80)
    assert done.returncode == 1
    assert "snnpart: rank 0 (dp 0, pp 0, tp 0) is in the loss, stage 0 for" in done.stderr
    assert "rank 1 (dp 0, pp 1, tp 0) is in the loss, stage 1 for" in done.stderr
