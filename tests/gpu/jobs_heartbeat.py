"""Two ranks of a pipeline whose steps are captured; in the ninth step rank 1 dies, or hangs, when both have agreed.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29512 python -m tests.gpu.jobs_heartbeat dies

No launcher that would end the others watches over them. What rank 0 says goes to its stderr.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from snnpart.api import parallelize
from tests.gpu.jobs_execution import DEVICE, T, batch, loss_fn, make_net

PATIENCE = 4.0
"""Seconds that a rank waits for another."""


def main(how: str) -> None:
    x, y = batch(0)
    options: dict[str, Any] = {"input_layout": "NCHW", "time_steps": T, "verify": "off"}
    program = parallelize(make_net(), example_inputs=x, pp=2, schedule="1f1b", microbatches=4, **options)
    running: Any = program.launch(
        lambda params: torch.optim.SGD(params, lr=0.01),
        device=DEVICE,
        execution="cuda_graph",
        timeout=timedelta(seconds=60),
    )
    for _ in range(8):
        running.train_step(x, y, loss_fn)
    running.settle()
    print(f"captured {running._execution.captures.captured}", file=sys.stderr, flush=True)
    running._engine.heartbeat._timeout = PATIENCE  # the first steps make communicators and graphs
    if running.ranks.rank == 1:
        running._execution._carry_out = lambda *_: os._exit(3) if how == "dies" else time.sleep(60)
    running.train_step(x, y, loss_fn)
    running.settle()


if __name__ == "__main__":
    main(sys.argv[1])
