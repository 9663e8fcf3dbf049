"""Heartbeat: each rank says now and then where it is, so that a step that hangs or breaks can name who is to blame.

A thread of every rank writes to a TCPStore of our own that rank 0 keeps: a counter, the operation the main thread is in
and for how long. Nothing here is part of a step, no process group is used, and a captured CUDA graph is not touched, so
it also sees what NCCL's watchdog does not.

When communication fails (a connection breaks, a wait takes longer than the timeout) the error is built from these
records: the rank that failed first, stopped answering, or is longest in an operation that waits for nobody.

A rank that raises in a step says so in the store, and its program is broken: it must be launched again. Another one
that waits for it in vain is woken by its own thread, which breaks the groups off (`Ranks.hang_up`), so that the wait
ends in that error within seconds. A rank that raises by itself, or is in no step, is left alone: who catches the same
error on all ranks may go on and launch again. What is said is never taken back, so nothing is said of errors after
which all go on: those that `Ranks.agree` raises everywhere, and those of a capture, which is given up (`attempt`).

A main thread that is still in one operation well after the timeout (in a loss that never ends, in a replayed graph)
cannot be woken; its own thread then writes the reason to stderr and ends the process, as NCCL's watchdog would.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from snnpart.errors import LaunchError, SnnpartError
from snnpart.runtime.ranks import Ranks, is_agreed

WAITS = ("receiving", "sending", "agreeing", "reducing", "sharing")
"""First words of operations in which a rank may wait for another."""
DEVICE = "waiting for the device"
"""First words of an operation that waits for a GPU."""
GRACE = 1.5
"""A process is ended after this many timeouts in one operation."""
MISSED = 4
"""Beats that a rank may miss."""
DOOMED = 30.0
"""Seconds that a rank may wait for its device once it has seen that another failed: a kernel that waits for a message
that never comes cannot be woken."""
HELD_UP = 2.0
"""Seconds for which a busy machine may hold a thread up."""


@dataclass
class _Seen:
    """The last record of a rank, and when it changed."""

    record: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


class Heartbeat:
    """This rank's records and what it knows of the others. With one rank it does nothing but remember the operation."""

    def __init__(self, ranks: Ranks, timeout: timedelta, end: Callable[[str], None] | None = None) -> None:
        """Collective. `end` is called with the reason instead of ending the process."""
        self._ranks, self._timeout = ranks, timeout.total_seconds()
        self._interval = min(1.0, self._timeout / 10)
        self._silence = max(HELD_UP, MISSED * self._interval)
        self._operation, self._since, self._count = "", time.monotonic(), 0
        self._seen = {rank: _Seen() for rank in range(ranks.mesh.size) if rank != ranks.rank}
        self._stop, self._end = threading.Event(), end or _end
        self._store: dist.TCPStore | None = None
        self._in_vain: float | None = None
        self._doomed_at: float | None = None
        self._attempts = False
        self.broken = False
        """Whether this rank failed, lost another or was woken: messages may be under way that nobody takes."""
        if ranks.mesh.size > 1:
            self._store = self._connect()
            self._thread = threading.Thread(target=self._beat, name="snnpart-heartbeat", daemon=True)
            self._thread.start()

    def _connect(self) -> dist.TCPStore:
        """Collective. No rank comes back before all are connected: the first may close its store right after, and who
        connects to a store that is gone tries on until the timeout.

        Raises:
            LaunchError: on every rank, when one cannot reach the store.
        """
        host, wait = os.environ.get("MASTER_ADDR", "localhost"), timedelta(seconds=max(10.0, self._timeout))
        first = self._ranks.rank == 0
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait) if first else None
        port = self._ranks.gather(store.port if store is not None else 0)[0]
        problem: LaunchError | None = None
        try:
            store = store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        except RuntimeError as error:
            fix = "set MASTER_ADDR to an address of rank 0's host that all ranks reach"
            problem = LaunchError(f"the store of heartbeats at {host}:{port} cannot be reached: {error}", fix=fix)
        self._ranks.agree(problem)
        assert store is not None
        return store

    @contextmanager
    def within(self, operation: str) -> Iterator[None]:
        """The main thread is in `operation` (its first word says whether it may wait for others)."""
        before, self._operation, self._since = self._operation, operation, time.monotonic()
        try:
            yield
        finally:
            self._operation, self._since = before, time.monotonic()

    @contextmanager
    def guard(self, operation: str, where: str, *, shared: bool = False) -> Iterator[None]:
        """`within`, and an error says where it happened.

        Failed communication becomes a LaunchError that names who is to blame; any other error gets a note and is made
        known to the others, unless all raise it: `Ranks.agree` did, or it is one of ours where these are `shared`.
        """
        try:
            with self.within(f"{operation}, {where}"):
                yield
        except Exception as error:
            alike = is_agreed(error) or (shared and isinstance(error, SnnpartError))
            if alike or self._attempts:
                raise
            place = f"{self._place(self._ranks.rank)}, {where}"
            if _is_communication(error):
                self.broken = self._store is not None
                raise LaunchError(
                    f"{operation} failed: {self.reason() or error}", where=place, fix="see the first rank that failed"
                ) from error
            self.failed(f"{operation}, {where}: {type(error).__name__}: {error}")
            error.add_note(f"in {operation} of {place}")
            raise

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Errors in here break nothing and are not made known: the caller has another way, for all ranks."""
        self._attempts = True
        try:
            yield
        finally:
            self._attempts = False

    def failed(self, what: str) -> None:
        """This rank's step failed: others will name it, unless another one was first. With one rank nothing breaks."""
        if self._store is None or self._attempts:
            return
        self.broken = True
        try:
            self._store.compare_set("failed", "", f"{self._ranks.rank} {what}")
        except RuntimeError:
            return  # the store went with rank 0

    def reason(self) -> str:
        """Who is to blame for what this rank waited for in vain; empty when nobody can be named.

        The last beat of a rank that is gone may be seen late: our thread looks once an interval, and may be held up.
        """
        patience = time.monotonic() + self._silence + self._interval + HELD_UP
        while self._store is not None:
            found = self._first_failure() or self._silent() or self._stuck(self._timeout / 2)
            if found or time.monotonic() > patience:
                return found or self._stuck(0.0) or self._away()
            time.sleep(self._interval / 2)
        return ""

    def close(self) -> None:
        """Stop the thread. Rank 0's store goes with it: call it when all ranks are through."""
        self._stop.set()
        if self._store is not None:
            self._thread.join()
            self._leave(self._store)
            self._store = None

    def _leave(self, store: dist.TCPStore) -> None:
        """Rank 0 waits a moment for the others, whose threads would write to its store in vain, which torch reports."""
        patience = time.monotonic() + self._silence
        try:
            store.set(f"left{self._ranks.rank}", "")
            others = [f"left{rank}" for rank in self._seen]
            while self._ranks.rank == 0 and not store.check(others) and time.monotonic() < patience:
                time.sleep(0.01)
        except RuntimeError:
            return  # the store went with rank 0

    def _beat(self) -> None:
        lost = False
        while self._count == 0 or not self._stop.wait(self._interval):  # at once: a rank may die in its first interval
            self._count += 1
            try:
                if not lost:
                    self._exchange()
                    self._wake()
            except RuntimeError:
                lost = True  # rank 0 is gone, and will be seen to be silent
            if self._is_overdue():
                inside = time.monotonic() - self._since
                here = f"{self._place(self._ranks.rank)} is in {self._operation} for {inside:.0f} s"
                self._end(f"{here}. {self.reason()}")
                return

    def _exchange(self) -> None:
        store = self._store
        if store is None:
            return
        inside = time.monotonic() - self._since
        record = {"count": self._count, "operation": self._operation, "seconds": inside}
        store.set(f"beat{self._ranks.rank}", json.dumps(record))
        for rank, seen in self._seen.items():
            if store.check([f"beat{rank}"]):
                found = json.loads(store.get(f"beat{rank}"))
                if found.get("count") != seen.record.get("count"):
                    seen.record, seen.at = found, time.monotonic()

    def _wake(self) -> None:
        """Break the groups off if another rank has failed and the main thread has been in one operation for a beat
        since: forward and backward wait for others too, and if it only computes, the step cannot be finished."""
        before, since, failure = self._in_vain, self._since, self._first_failure()
        if failure and self._doomed_at is None:
            self._doomed_at = time.monotonic()
        doomed = bool(self._operation and failure)
        self._in_vain = since if doomed else None
        if doomed and before == since:
            self.broken = True
            self._ranks.hang_up()

    def _is_overdue(self) -> bool:
        """Whether the main thread has been in one operation for so long that the process is to end."""
        now, operation, since = time.monotonic(), self._operation, self._since
        if not operation:
            return False
        doomed = self._doomed_at if operation.startswith(DEVICE) else None
        return now - since > GRACE * self._timeout or (doomed is not None and now - max(since, doomed) > DOOMED)

    def _first_failure(self) -> str:
        assert self._store is not None
        try:
            known = self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        except RuntimeError:
            return ""
        rank, _, what = known.partition(" ")
        return f"{self._place(int(rank))} failed in {what}" if rank and int(rank) != self._ranks.rank else ""

    def _silent(self) -> str:
        now = time.monotonic()
        for rank, seen in self._seen.items():
            if seen.record and now - seen.at > self._silence:
                return f"{self._place(rank)} stopped answering {now - seen.at:.0f} s ago, {_inside(seen.record)}"
        return ""

    def _stuck(self, least: float) -> str:
        """The rank that is longest, and at least so many seconds, in an operation that waits for nobody."""
        busy = {rank: seen.record for rank, seen in self._seen.items() if _is_busy(seen.record)}
        rank = max(busy, key=lambda r: busy[r]["seconds"], default=None)
        if rank is None or busy[rank]["seconds"] < least:
            return ""
        return f"{self._place(rank)} is {_inside(busy[rank])} for {busy[rank]['seconds']:.0f} s"

    def _away(self) -> str:
        """A rank that is not in a step at all."""
        away = [rank for rank, seen in self._seen.items() if seen.record and not seen.record["operation"]]
        return f"{self._place(away[0])} is between steps" if away else ""

    def _place(self, rank: int) -> str:
        at = self._ranks.mesh.coordinate(rank)
        return f"rank {rank} (dp {at.dp}, pp {at.pp}, tp {at.tp})"


def _is_communication(error: Exception) -> bool:
    """gloo's errors are plain RuntimeErrors that name its source file, or say that their group was broken off."""
    ours = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "caused pair closure"))
    return isinstance(error, dist.DistError) or ours


def _is_busy(record: Mapping[str, Any]) -> bool:
    operation = record.get("operation", "")
    return bool(operation) and not operation.startswith(WAITS)


def _inside(record: Mapping[str, Any]) -> str:
    return f"in {record['operation']}" if record.get("operation") else "between steps"


def _end(reason: str) -> None:
    """End the process: its main thread cannot be woken."""
    print(f"snnpart: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
