"""Who is named for a wait in vain, as one rank sees it. Real ranks: tests/distributed/test_heartbeat.py."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from snnpart.mesh import Mesh
from snnpart.runtime.collectives import Axis
from snnpart.runtime.heartbeat import Heartbeat
from snnpart.runtime.ranks import Ranks


class FirstOfTwo(Heartbeat):
    """Rank 0 of a pipeline of two; nobody else is there."""

    def __init__(self) -> None:
        alone = Axis(None, 0, (0, 1))
        super().__init__(Ranks(0, Mesh(1, 2, 1), torch.device("cpu"), {}, alone), timedelta(seconds=1))
        self._silence = 1.5

    def _connect(self) -> dist.TCPStore:
        return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def hear(self, count: int) -> None:
        """A beat of rank 1, which waits for us as far as it has said."""
        assert self._store is not None
        record = {"count": count, "operation": "receiving, stage 1", "seconds": 0.0}
        self._store.set("beat1", json.dumps(record))


def test_a_wait_for_the_device_is_given_up_sooner_when_a_rank_has_failed() -> None:
    """A kernel that waits for another rank cannot be woken; a wait on the host is, and is not counted here."""
    heartbeat = FirstOfTwo()
    heartbeat._timeout = 600.0
    found = []
    with heartbeat.within("waiting for the device, in a captured step"):
        found.append(heartbeat._patience())
        assert heartbeat._store is not None
        heartbeat._store.set("failed", "1 the loss, stage 1: ValueError: no such loss")
        found.append(heartbeat._patience())
    with heartbeat.within("receiving, stage 0"):
        found.append(heartbeat._patience())
    heartbeat._silence = 0.0  # nobody else will leave
    heartbeat.close()
    assert found == [900.0, 30.0, 900.0]


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
