"""One measurement of snnpart's train step for `vision_train.py`; run by torchrun. Prints `RESULT {json}` on rank 0.

Every step takes another batch from pinned memory. Peak memory is the allocator's largest reservation over all ranks,
from the launch on: warm-up, capture and graph pools are in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from snnpart import parallelize  # noqa: E402
from snnpart.vision.metrics import peak_bytes  # noqa: E402
from tools.bench.side import finish, rate  # noqa: E402
from tools.bench.turn import wait_for_turn  # noqa: E402
from tools.bench.vision_images import images_of, repeated  # noqa: E402
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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", help="default bf16, and fp32 on the CPU")
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1, help="times that the steps are measured")
    parser.add_argument("--evaluate", action="store_true", help="measure evaluations, not train steps")
    parser.add_argument("--images", help="what evaluations read, see vision_images.py; default random images")
    parser.add_argument("--plain", action="store_true", help="without fused neurons and channels last")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    return parser.parse_args()


def start(asked: argparse.Namespace) -> tuple[Any, float, float]:
    """The running program, and the seconds that compiling and launching took."""
    began = time.perf_counter()
    torch.manual_seed(0)
    model = network(asked.model, asked.size)
    example = torch.randn(asked.batch, 3, asked.size, asked.size)
    fast = not asked.plain and asked.device == "cuda"
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
        fuse=fast,
        channels_last="auto" if fast else False,
    )
    compiled = time.perf_counter() - began
    wait_for_turn()
    began = time.perf_counter()
    running = program.launch(
        None if asked.evaluate else lambda params: torch.optim.AdamW(params, lr=1e-3),
        device=asked.device,
        execution=asked.mode,
        precision=asked.precision or ("bf16" if asked.device == "cuda" else "fp32"),
    )
    return running, compiled, time.perf_counter() - began


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    running, compiled, launched = start(asked)
    batches = batches_of(asked, running.ranks.at.dp)

    def step(number: int) -> Any:
        if asked.evaluate:
            return running.eval_step(batches[number % 4][0]).sum()
        return running.train_step(*batches[number % 4], F.cross_entropy)

    found = measured(running, step, asked, "images_per_second")
    return {**found, "compile_s": compiled, "launch_s": launched}


def batches_of(asked: argparse.Namespace, copy: int) -> list[tuple[Tensor, Tensor]]:
    """Four batches of images and classes, in pinned memory where there is a GPU."""
    generator = torch.Generator().manual_seed(copy)
    shape = (asked.batch, 3, asked.size, asked.size)
    if asked.images is None:
        made = [(torch.randn(shape, generator=generator), torch.randint(0, CLASSES, shape[:1])) for _ in range(4)]
    else:
        images, classes = images_of(asked.images, asked.size)
        parts = [(4 * copy + number) * asked.batch for number in range(4)]
        made = [(repeated(images, asked.batch, first), repeated(classes, asked.batch, first)) for first in parts]
    return [(x.pin_memory(), y.pin_memory()) for x, y in made] if asked.device == "cuda" else made


def measured(running: Any, step: Callable[[int], Any], asked: argparse.Namespace, name: str) -> dict[str, Any]:
    """What steps give under `name` in samples/s of all ranks, and their memory; then the program is closed."""
    began = time.perf_counter()
    step(0).item()
    first, alive = time.perf_counter() - began, age()
    for number in range(1, asked.warm):
        step(number)
    running.settle()
    rounds = [rate(step, asked.batch, asked.steps) * running.ranks.mesh.dp for _ in range(asked.rounds)]
    memory = reserved(running.ranks)
    if asked.profile:
        profiled(lambda: step(0), running.ranks.rank)
    result = {name: statistics.median(rounds), "rounds": rounds, "peak_memory_bytes": memory}
    result |= {"loss": step(0).item(), "first_step_s": first, "process_s": alive, "notices": list(running.notices)}
    running.close()
    return result


def age() -> float:
    """Seconds since this process began, imports included."""
    ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def reserved(ranks: Any) -> int:
    """Bytes of the allocator's largest reservation on any rank; without a GPU of the largest process."""
    if ranks.device.type != "cuda":
        return peak_bytes(ranks)
    return int(max(ranks.gather(torch.cuda.max_memory_reserved())))


def profiled(step: Any, rank: int) -> None:
    """Kernels of one step by their total time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    if rank == 0:
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70))


if __name__ == "__main__":
    finish(measure(options()))
