"""What ranks do in the pipeline benchmark: train steps of a compiled pipeline on real process groups, on a clock.

Each rank notes when it computes: the time it spends in forwards and backwards, and when the step began and ended. All
ranks share one machine's clock.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from snnpart import parallelize
from snnpart.costs import MachineProfile
from tools.bench.pipeline_nets import CHAIN, LARGE, SMALL

STEPS = 4
COMPUTING = ("forward", "backward", "the loss")
KINDS = {"chain": CHAIN, "small": SMALL, "large": LARGE}


@dataclass(frozen=True)
class RankTimes:
    """One rank's measured steps: seconds computing, start and end of each; the peak of its device's memory, and what
    the program says that it holds, with the batch, which every rank is given."""

    computing: list[float]
    started: list[float]
    ended: list[float]
    peak: int
    predicted_bytes: int


@dataclass(frozen=True)
class Job:
    """A pipeline to run: a network of `KINDS`, its plan, and the device."""

    net: str
    pp: int
    schedule: str
    microbatches: int
    device: str = "cpu"
    split_at: tuple[str, ...] | None = None
    profile: str | None = None
    fused: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of `parallelize`."""
        profile = None if self.profile is None else MachineProfile.from_json(self.profile)
        return {
            "pp": self.pp, "schedule": self.schedule, "microbatches": self.microbatches, "split_at": self.split_at,
            "profile": profile, "input_layout": KINDS[self.net].layout, "verify": "off",
            **({"fuse": True, "channels_last": True} if self.fused else {}),
        }  # fmt: skip


def run_ranks(job: Job) -> list[RankTimes]:
    """The job on pp processes of this machine."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        multiprocessing.spawn(_rank, (job, port, folder), nprocs=job.pp)
        return [RankTimes(**json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(job.pp)]


def _rank(rank: int, job: Job, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.pp), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": str(job.pp), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(job.device, rank % torch.cuda.device_count()) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # what neuron layers hold is found out there
    if job.device == "cuda" and torch.cuda.device_count() < job.pp:
        torch.distributed.init_process_group("gloo")  # NCCL wants a GPU for each rank
    x, y = KINDS[job.net].batch()
    model = KINDS[job.net].make()
    program = parallelize(model, example_inputs=x, **job.options())
    running = program.launch(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), device=device, execution="eager")
    notes = _Notes(running)
    for step in range(STEPS):
        if step == 1 and job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        torch.distributed.barrier()
        notes.begin()
        running.train_step(x, y, KINDS[job.net].loss)
    peak = torch.cuda.max_memory_allocated() if job.device == "cuda" else 0
    found = notes.result(peak, program.compiled.footprint(rank, 0).peak + x.nbytes + y.nbytes)
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(found)))
    running.close()


class _Notes:
    """When this rank computed, from what it tells its heartbeat."""

    def __init__(self, running: Any) -> None:
        self._spans: list[list[tuple[float, float]]] = []
        heartbeat = running._engine.heartbeat
        self._guard, heartbeat.guard = heartbeat.guard, self._noting

    def begin(self) -> None:
        """A step begins."""
        self._spans.append([])

    @contextmanager
    def _noting(self, operation: str, where: str, **options: Any) -> Iterator[None]:
        computes = operation.startswith(COMPUTING)
        with self._guard(operation, where, **options):
            started = time.monotonic()
            yield
            if computes:
                torch.cuda.synchronize() if torch.cuda.is_initialized() else None
                self._spans[-1].append((started, time.monotonic()))

    def result(self, peak: int, predicted: int) -> RankTimes:
        """All steps but the first, which checks more."""
        steps = self._spans[1:]
        return RankTimes(
            computing=[sum(end - start for start, end in spans) for spans in steps],
            started=[spans[0][0] for spans in steps],
            ended=[spans[-1][1] for spans in steps],
            peak=peak,
            predicted_bytes=predicted,
        )


def bubble(ranks: list[RankTimes]) -> list[float]:
    """The share of the ranks' time in which they do not compute, of each step."""
    found = []
    for step in range(len(ranks[0].computing)):
        whole = max(rank.ended[step] for rank in ranks) - min(rank.started[step] for rank in ranks)
        found.append(1 - sum(rank.computing[step] for rank in ranks) / (whole * len(ranks)))
    return found
