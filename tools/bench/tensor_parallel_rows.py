"""What the parts of the tensor-parallel benchmark share: rows, the CSV they are merged into, and the two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import rows as results
from rows import Row, read, versions, write

RANKS = 2
RATE = "1gbit"
ADDRESSES = ("10.221.0.1", "10.221.0.2")


def row(point: str, metric: str, unit: str, ours: Any, **others: Any) -> Row:
    """One row of the table; numbers are written with five digits."""
    said = {"spread": 0, "versions": versions("spikingjelly"), **others}
    made = results.row("tensor_parallel", point, metric, unit, ours=ours, **said)
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in made.items()}


def merge(path: Path, rows: Sequence[Row], missing: Sequence[Row]) -> None:
    """Write the rows into the CSV in the place of those with the same metrics from the same machine (and of rows not
    run); what is `missing` is added unless the CSV has it."""
    new = {(found["metric"], found["machine"]) for found in rows}
    points = {(found["point"], found["metric"]) for found in rows}
    old = read(path)
    kept = [r for r in old if (r["metric"], r["machine"]) not in new and (r["point"], r["metric"]) not in points]
    there = {(found["point"], found["metric"]) for found in (*kept, *rows)}
    table = [*kept, *rows, *(found for found in missing if (found["point"], found["metric"]) not in there)]
    order = list(dict.fromkeys(found["metric"] for found in table))
    write(path, sorted(table, key=lambda found: order.index(found["metric"])))


def on_ranks(script: Path, arguments: Sequence[str], *, throttled: bool = False, limit: float = 570.0) -> Any:
    """Run a script on two ranks and return what rank 0 writes, as JSON, into the file that its last argument names.

    Raises:
        RuntimeError: a rank failed, or took longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder, _link(throttled) as hosts:
        target = Path(folder, "result.json")
        command = [sys.executable, str(script), *arguments, str(target)]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(RANKS)]
        started = [_start(command, rank, hosts, log) for rank, log in enumerate(logs)]
        try:
            codes: list[int | None] = [process.wait(limit) for process in started]
        except subprocess.TimeoutExpired:
            codes = [None for _ in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes) or None in codes or not target.exists():
            raise RuntimeError(f"the ranks ended with {codes}:\n" + "\n".join(log.read_text()[-3000:] for log in logs))
        return json.loads(target.read_text())


def _start(command: Sequence[str], rank: int, hosts: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """One rank: in its network namespace where there is one, on one thread."""
    inside = ["ip", "netns", "exec", _space(rank)] if hosts else []
    address, interface = (hosts[0], f"veth{rank}") if hosts else ("127.0.0.1", "lo")
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as file:
        return subprocess.Popen([*inside, *command], env={**os.environ, **environment}, stdout=file, stderr=file)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


PORT = _free_port()


def _space(rank: int) -> str:
    return f"snnpart{os.getpid()}-{rank}"


@contextmanager
def _link(throttled: bool) -> Iterator[Sequence[str]]:
    """Two network namespaces joined by a pair of virtual interfaces of `RATE` each way; without, the loopback.

    Raises:
        RuntimeError: the machine does not permit it (it takes root, `ip` and `tc`).
    """
    if not throttled:
        yield ()
        return
    try:
        for rank in range(RANKS):
            _ip("netns", "add", _space(rank))
        first, second = (_space(rank) for rank in range(RANKS))
        _ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth1", "netns", second)
        for rank, address in enumerate(ADDRESSES):
            space, name = _space(rank), f"veth{rank}"
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", space, "link", "set", name, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            shape = ("qdisc", "add", "dev", name, "root", "tbf", "rate", RATE, "burst", "128kb", "latency", "50ms")
            _run(["tc", "-n", space, *shape])
        yield ADDRESSES
    finally:
        for rank in range(RANKS):
            with suppress(RuntimeError):
                _ip("netns", "del", _space(rank))


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not installed") from error
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` is refused: {done.stderr.strip()}")
