"""One measurement of snnpart's train step for `vision_train.py`; run by torchrun. Prints `RESULT {json}` on rank 0.

Every step takes another batch from pinned memory. Peak memory is the allocator's largest reservation over all ranks,
from the launch on: warm-up, capture and graph pools are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from snnpart import parallelize  # noqa: E402
from tools.bench.turn import wait_for_turn  # noqa: E402
from tools.bench.vision_models import CLASSES, NAMES, network  # noqa: E402


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NAMES, default=NAMES[0])
    parser.add_argument("--batch", type=int, default=32, help="images a step of each data-parallel rank")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--dp", default="ddp")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=None)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1, help="times that the steps are measured")
    parser.add_argument("--evaluate", action="store_true", help="measure evaluations, not train steps")
    parser.add_argument("--plain", action="store_true", help="without fused neurons and channels last")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    return parser.parse_args()


def start(asked: argparse.Namespace) -> tuple[Any, float, float]:
    """The running program, and the seconds that compiling and launching took."""
    began = time.perf_counter()
    torch.manual_seed(0)
    model = network(asked.model, asked.size)
    example = torch.randn(min(asked.batch, 4), 3, asked.size, asked.size)
    kernels = {"fuse": False, "channels_last": False} if asked.plain else {"fuse": True, "channels_last": True}
    program = parallelize(
        model,
        example_inputs=example,
        input_layout="NCHW",
        tp=asked.tp,
        pp=asked.pp,
        dp=asked.dp,
        microbatches=asked.microbatches,
        schedule=asked.schedule,
        verify="off",
        shard="time" if asked.tp > 1 else "max",
        **kernels,
    )
    compiled = time.perf_counter() - began
    wait_for_turn()
    began = time.perf_counter()
    running = program.launch(
        None if asked.evaluate else lambda params: torch.optim.AdamW(params, lr=1e-3),
        device="cuda",
        execution=asked.mode,
        precision=asked.precision,
    )
    return running, compiled, time.perf_counter() - began


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    running, compiled, launched = start(asked)
    generator = torch.Generator().manual_seed(running.ranks.at.dp)
    shape = (asked.batch, 3, asked.size, asked.size)
    batches = [
        (torch.randn(shape, generator=generator).pin_memory(), torch.randint(0, CLASSES, shape[:1]).pin_memory())
        for _ in range(4)
    ]

    def step(number: int) -> Any:
        if asked.evaluate:
            return running.eval_step(batches[number % 4][0]).sum()
        return running.train_step(*batches[number % 4], F.cross_entropy)

    began = time.perf_counter()
    step(0).item()
    first = time.perf_counter() - began
    for number in range(1, asked.warm):
        step(number)
    running.settle()
    rounds = [timed(step, asked) * running.ranks.mesh.dp for _ in range(asked.rounds)]
    memory = max(running.ranks.gather(torch.cuda.max_memory_reserved()))
    if asked.profile:
        profiled(lambda: step(0), running.ranks.rank)
    result = {"images_per_second": statistics.median(rounds), "rounds": rounds, "peak_memory_bytes": memory}
    result |= {"loss": step(0).item(), "compile_s": compiled, "launch_s": launched, "first_step_s": first}
    result |= {"notices": list(running.notices)}
    running.close()
    return result


def timed(step: Callable[[int], Any], asked: argparse.Namespace) -> float:
    """Images/s of one data-parallel rank over the measured steps."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(asked.steps):
        step(number)
    torch.cuda.synchronize()
    return float(asked.batch * asked.steps / (time.perf_counter() - began))


def profiled(step: Any, rank: int) -> None:
    """Kernels of one step by their total time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    if rank == 0:
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    result = measure(options())
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT " + json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
