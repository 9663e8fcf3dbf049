"""Which way each kind of fused neuron runs on this machine: measured where it first occurs, kept in a file.

A way is a function that does one forward (and backward) of the kind. One that raises is no way. What is kept says how
long each took, so that a reader sees by how much the choice was made:

    {"9c31e0a7f2d4 bfloat16 2^22 backward": {"way": "kernel", "microseconds": {"kernel": 61.2, "compiled": 88.0}}}
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from snnpart import compat
from snnpart.costs import keep, user_cache

_WARM, _TIMED = 3, 10
_log = logging.getLogger("snnpart")
Way = Callable[[], Any]


@dataclass
class Choices:
    """The ways chosen so far. `seconds` times one way."""

    path: Path
    seconds: Callable[[Way], float]
    _known: dict[str, Any] = field(default_factory=dict)

    def choose(self, kind: str, ways: Mapping[str, Way]) -> str:
        """The fastest of the ways for this kind, the first of them where none can be timed."""
        way = self.known(kind)
        if way in ways:
            return way
        times: dict[str, float] = {}
        for name, run in ways.items():
            try:
                times[name] = self.seconds(run)
            except Exception as error:  # whatever a compiler refuses to take is no way to run it
                _log.info("%s cannot run as '%s': %s", kind, name, error)
        way = min(times, key=times.__getitem__, default=next(iter(ways)))
        self._known[kind] = {"way": way, "microseconds": {name: round(t * 1e6, 1) for name, t in times.items()}}
        self._keep()
        return way

    def known(self, kind: str) -> str:
        """The way that was chosen for this kind, here or by another process; empty where none was."""
        if kind not in self._known:
            self._known = {**self._read(), **self._known}
        return str(self._known.get(kind, {}).get("way", ""))

    def _read(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and all(isinstance(item, dict) for item in found.values()) else {}

    def _keep(self) -> None:
        """Write what is known, with what other processes have written meanwhile; a full disk costs only the file."""
        self._known = {**self._read(), **self._known}
        try:
            keep(self.path, json.dumps(self._known, indent=1, sort_keys=True))
        except OSError as error:
            _log.info("%s cannot be written: %s", self.path, error)


@cache
def of_this_machine(device: torch.device) -> Choices:
    """The choices for a GPU of this machine, which the user's cache keeps."""
    model = torch.cuda.get_device_name(device).replace(" ", "-")
    name = f"captured-ways-{platform.node()}-{model}-torch{torch.__version__}.json"
    return Choices(user_cache() / name, cuda_seconds)


def cuda_seconds(way: Way) -> float:
    """What one call takes the GPU, the mean of several after some that compile and warm up.

    Steps are captured wherever speed matters: what the host needs to launch kernels is not to count. The call is
    therefore captured too, and replayed; what cannot be captured is timed as it runs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            way()
    torch.cuda.current_stream().wait_stream(stream)
    run = _captured(way) or way
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(_TIMED):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _TIMED


def _captured(way: Way) -> Way | None:
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            way()
    except RuntimeError as error:
        torch.cuda.set_stream(before)  # torch does not leave the capture's stream when the capture cannot be ended
        compat.end_failed_capture(before.device)
        _log.info("timed without a CUDA graph: %s", error)
        return None
    return graph.replay
