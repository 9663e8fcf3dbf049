"""A pool of worker processes that run jobs under gloo: started once for a session, used for 1 to 4 ranks.

The workers are forked from one server process that has imported torch, so that four of them cost little more than one.

A job is a function given by import path, with plain arguments; each rank calls it inside a process group of its own
that is made for the job and destroyed after. Results come back by rank. When a rank fails, or a job takes too long, the
workers are killed and made again, and `JobFailed` shows every rank's traceback.
"""

from __future__ import annotations

import importlib
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

SIZE = 4
GRACE = 5.0
ROOT = Path(__file__).parents[2]
PRELOAD = ["torch", "torch.distributed.fsdp", "snnpart.api", "snnpart.runtime.launch", "tests.distributed.jobs_launch"]


class JobFailed(AssertionError):
    """A rank raised, died or did not come back in time. `errors[rank]` is the exception or a text."""

    def __init__(self, errors: dict[int, Any], text: str) -> None:
        super().__init__(text)
        self.errors = errors


class Pool:
    """Worker processes. `run` may be called any number of times, from one thread."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._workers: list[tuple[Any, connection.Connection]] = []

    def run(self, job: str, *, ranks: int, timeout: float = 90.0, **arguments: Any) -> list[Any]:
        """Call `job` ("package.module:function") with the arguments on ranks 0..ranks-1; their results in order.

        Raises:
            JobFailed: a rank failed or hung.
        """
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                task = (job, arguments, rank, ranks, str(Path(folder, "store")), timeout)
                self._workers[rank][1].send_bytes(pickle.dumps(task))
            results = self._collect(ranks, timeout)
        errors = {rank: error for rank, (ok, error) in results.items() if not ok}
        if len(results) < ranks:
            self.close()
            errors.update({rank: "did not come back" for rank in range(ranks) if rank not in results})
        if errors:
            raise JobFailed({r: e[0] if isinstance(e, tuple) else e for r, e in errors.items()}, _text(job, errors))
        return [results[rank][1] for rank in range(ranks)]

    def _collect(self, ranks: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        """What came back in time; once a rank has failed the others get a short grace only."""
        waiting = {self._workers[rank][1]: rank for rank in range(ranks)}
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    deadline = min(deadline, time.monotonic() + GRACE)
                    continue
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results

    def _start(self) -> None:
        if self._workers and all(process.is_alive() for process, _ in self._workers):
            return
        self.close()
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for _ in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def close(self) -> None:
        """End the workers."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


def _work(pipe: connection.Connection) -> None:
    """A worker's life: one job after the other until the pipe closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run(*task)))
        except Exception as error:
            answer = _failure(error)
        pipe.send_bytes(answer)


def _run(job: str, arguments: dict[str, Any], rank: int, ranks: int, store: str, timeout: float) -> Any:
    import torch
    import torch.distributed as dist

    module, _, function = job.partition(":")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    torch.manual_seed(0)
    dist.barrier()  # a rank that is through at once closes connections that others are still making
    try:
        return getattr(importlib.import_module(module), function)(**arguments)
    finally:
        torch.set_default_dtype(torch.float32)
        if dist.is_initialized():
            dist.destroy_process_group()


def _failure(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps((False, (error, text)))
    except Exception:
        return pickle.dumps((False, (RuntimeError(str(error)), text)))


def _text(job: str, errors: dict[int, Any]) -> str:
    parts = [f"rank {r}: {e[1] if isinstance(e, tuple) else e}" for r, e in sorted(errors.items())]
    return f"{job} failed on {len(errors)} ranks\n" + "\n".join(parts)
