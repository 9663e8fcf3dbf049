"""When gradients are reduced over dp: a log of backwards and of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from snnpart import compat, parallelize
from snnpart.ops_later import PutOff
from snnpart.runtime.buckets import Buckets
from snnpart.runtime.launch import launch
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.jobs import dp_share
from tests.distributed.jobs_execution import OPTIMIZERS
from tests.distributed.layout_nets import images, loss_fn, made


def reductions(name: str, execution: str, **topology: Any) -> list[str]:
    """What happens in the second step: `backward` and `last backward` begin, `end` of either, `reduce` a bucket."""
    case, log = CASES[name], list[str]()
    around, start = compat.ddp_around, Buckets._start

    def watched_ddp(module: Any, group: Any) -> Any:
        ddp = around(module, group)
        ddp.register_comm_hook(group, lambda state, bucket: log.append("reduce") or allreduce_hook(state, bucket))  # type: ignore[func-returns-value]
        return ddp

    def watched_start(self: Any, bucket: Any) -> None:
        log.append("reduce")
        start(self, bucket)

    compat.ddp_around, Buckets._start = watched_ddp, watched_start  # type: ignore[assignment, method-assign]
    try:
        running = launch(compile_case(case, **topology), optimizer=OPTIMIZERS["sgd"], execution=execution)
        parallel = running._engine.parallel
        backward = parallel.backward

        def watched(roots: Any, grads: Any, last: bool) -> None:
            log.append("last backward" if last else "backward")
            backward(roots, grads, last)
            log.append("end")

        in_pieces = parallel.in_pieces

        @contextmanager
        def watched_pieces() -> Iterator[None]:
            log.append("backward")
            with in_pieces():
                yield
            log.append("end")

        parallel.backward, parallel.in_pieces = watched, watched_pieces  # type: ignore[method-assign]
        x, y = case.batches()[0]
        mine = dp_share(x, case.batch_dim, running.ranks), dp_share(y, case.target_dim, running.ranks)
        for _ in range(2):
            log.clear()
            running.train_step(*mine, case.loss_fn(x.shape[case.batch_dim]))
        running.close()
    finally:
        compat.ddp_around, Buckets._start = around, start  # type: ignore[method-assign]
    return log


def sums_of_gradients(execution: str, **options: Any) -> list[str]:
    """What the backward of the second step does: `sum` is begun over tp, `weight`: a gradient that was put off is
    computed, `wait`: for the sum."""
    log = list[str]()
    exchange, reduce, compute = dist.all_to_all_single, dist.all_reduce, PutOff.compute

    class Watched:
        def __init__(self, work: Any) -> None:
            log.append("sum")
            self.work = work

        def wait(self) -> None:
            log.append("wait")
            self.work.wait()

    def watched_reduce(*args: Any, **given: Any) -> Any:
        work = reduce(*args, **given)
        return Watched(work) if given.get("async_op") else work

    def watched_compute(self: PutOff) -> None:
        log.append("weight" if self._how is not None else "")
        compute(self)

    dist.all_to_all_single = lambda *args, **given: Watched(exchange(*args, **given))
    dist.all_reduce, PutOff.compute = watched_reduce, watched_compute  # type: ignore[method-assign]
    try:
        x = images()
        program = parallelize(made("masked"), example_inputs=x, tp=2, verify="off", **options)
        running: Any = program.launch(OPTIMIZERS["sgd"], execution=execution)
        for _ in range(2):
            log.clear()
            running.train_step(x, torch.zeros(len(x)), loss_fn)
        running.close()
    finally:
        dist.all_to_all_single, dist.all_reduce, PutOff.compute = exchange, reduce, compute  # type: ignore[method-assign]
    return [entry for entry in log if entry]
