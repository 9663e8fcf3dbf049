"""How near a train step comes to the roofline of its own work, and what the rest of it is, on one GPU.

    python tools/bench/roofline.py                      SEW-ResNet34, batch 256, 128x128, T=4, bfloat16
    python tools/bench/roofline.py --model Spikformer-S --batch 128
    python tools/bench/roofline.py --quick              a small step on the CPU; writes no file

The roofline (`snnpart.roofline`) counts the work of the graphs that run: each convolution and product at the larger of
its flops over the rate of matrix products and its bytes over the copy bandwidth, each fused norm and neuron, pooling
and the optimizer at their bytes over the bandwidth, forward and backward. Rate and bandwidth are measured here, just
before. Steps are those of `vision_train.py`: captured, AdamW, another batch from pinned memory each time. The time of
kernels is by the profiler, in steps of their own, and its groups are those of `runtime.kernel_kinds`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from snnpart import parallelize  # noqa: E402
from snnpart.costs import MachineProfile, default_profile  # noqa: E402
from snnpart.passes.analyze.roofline import roofline  # noqa: E402
from snnpart.roofline import total  # noqa: E402
from snnpart.runtime import profile_text, profiling  # noqa: E402
from snnpart.runtime.kernel_kinds import Share  # noqa: E402
from snnpart.runtime.precision import DTYPES  # noqa: E402
from snnpart.runtime.profiling import Whole  # noqa: E402
from tools.bench.rows import RESULTS, Row, gpus, read, replaced, row, versions, write  # noqa: E402
from tools.bench.vision_models import CLASSES, NAMES, network  # noqa: E402

LEAST = {("SEW-ResNet34", 256): 0.45}
"""The share that is asked for, by network and batch."""


@dataclass(frozen=True)
class Asked:
    """A step, and how often it is measured."""

    model: str
    batch: int
    size: int
    precision: str
    warm: int
    steps: int
    repeats: int

    @property
    def point(self) -> str:
        return f"{self.model} 1GPU G={self.batch}"


QUICK = Asked("SEW-ResNet34", 2, 32, "fp32", warm=1, steps=1, repeats=1)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step in each repeat, the step as profiled, its roofline in microseconds, and kernels by group."""

    seconds: tuple[float, ...]
    whole: Whole
    least: float
    shares: Sequence[Share]
    machine: MachineProfile

    @property
    def share(self) -> float:
        """Roofline over step."""
        return self.least / self.whole.step


def measure(asked: Asked, device: torch.device) -> Measured:
    """Compile, launch, warm up, measure, profile."""
    low = DTYPES[asked.precision]
    machine = profiling.measured_machine(default_profile(), device, low or torch.float32)
    torch.manual_seed(0)
    program = parallelize(
        network(asked.model, asked.size),
        example_inputs=torch.randn(min(asked.batch, 4), 3, asked.size, asked.size),
        input_layout="NCHW",
        verify="off",
        fuse=True,
        channels_last=True,
    )
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
    profiling.watched(lambda: torch.zeros(1, device=device), device)  # there before a step is captured
    launched: Any = program.launch(adamw, device=str(device), execution="auto", precision=asked.precision)
    with launched as running:
        step = _steps(running, asked, pinned=device.type == "cuda")
        profiling.timed(step, device, asked.warm)
        seconds = tuple(profiling.timed(step, device, asked.steps) for _ in range(asked.repeats))
        whole = replace(profiling.whole(step, device, repeats=1), step=1e6 * statistics.median(seconds))
        works = roofline(program.compiled, machine, asked.batch, low)
        shares = profile_text.shares_of(whole, works, running.ranks)
        for notice in running.notices:
            print(f"notice: {notice}")
    return Measured(seconds, whole, total(works), shares, machine)


def _steps(running: Any, asked: Asked, pinned: bool) -> Callable[[], Any]:
    """A train step on the next of four batches."""
    shape = (asked.batch, 3, asked.size, asked.size)
    batches = [(torch.randn(shape), torch.randint(0, CLASSES, shape[:1])) for _ in range(4)]
    batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches] if pinned else batches
    numbers = iter(range(sys.maxsize))
    return lambda: running.train_step(*batches[next(numbers) % 4], F.cross_entropy)


def rows(asked: Asked, found: Measured) -> list[Row]:
    """The share, and a row for each group of kernels and for the gaps between them."""
    low = str(DTYPES[asked.precision] or torch.float32).removeprefix("torch.")
    rates = f"{found.machine.flops[low] / 1e12:.3g} Tflop/s {low}, copies {found.machine.copy / 1e12:.3g} TB/s"
    wanted = LEAST.get((asked.model, asked.batch), 0.0)
    step = found.whole.step
    share = _row(
        asked,
        "share of roofline",
        "1",
        ours=f"{found.share:.3f}",
        repeats=len(found.seconds),
        spread=f"{(max(found.seconds) - min(found.seconds)) / statistics.median(found.seconds):.3f}",
        status="ok" if found.share >= wanted else "failed",
        note=f"roofline {found.least / 1e3:.3f} ms of a step of {step / 1e3:.3f} ms; measured {rates}"
        + (f"; at least {wanted:g} is asked for" if wanted else ""),
    )
    return [share, *(_kernels(asked, one, step) for one in _with_gaps(found))]


def _with_gaps(found: Measured) -> list[Share]:
    return [*found.shares, Share("gaps", max(0.0, found.whole.step - found.whole.busy), 0.0)]


def _kernels(asked: Asked, one: Share, step: float) -> Row:
    longest = f"; the longest: {one.longest[: profile_text.NAMED]}" if one.longest else ""
    note = f"roofline {one.least / 1e3:.3f} ms; {100 * one.measured / step:.1f} % of the step{longest}"
    ours = f"{one.measured / 1e3:.3f}"
    return _row(asked, f"time: {one.group}", "ms", ours=ours, repeats=profiling.PROFILED, note=note)


def _row(asked: Asked, metric: str, unit: str, **values: Any) -> Row:
    return row("roofline", asked.point, metric, unit, machine=gpus(), versions=versions("spikingjelly"), **values)


def not_run(asked: Asked) -> Row:
    """The row where there is no GPU."""
    command = f"python tools/bench/roofline.py --model {asked.model} --batch {asked.batch}"
    return _row(asked, "share of roofline", "1", status="not-run", note=f"needs 1 GPU; {command}") | {"machine": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default=NAMES[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="a small step, on the CPU too; writes only to --output")
    parser.add_argument("--output", type=Path, help="CSV; default docs/results/roofline.csv (not with --quick)")
    options = parser.parse_args()
    asked = Asked(options.model, options.batch, 128, "bf16", warm=10, steps=40, repeats=3)
    target = options.output or (None if options.quick else RESULTS / "roofline.csv")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    if device.type == "cpu" and not options.quick:
        made = [not_run(asked)]
    else:
        asked = replace(QUICK, model=options.model) if options.quick else asked
        found = measure(asked, device)
        made = rows(asked, found)
        print(f"{made[0]['point']}: {made[0]['ours']} of the roofline; {made[0]['note']}")
        print("\n".join(profile_text.rest_table(found.shares, found.whole)))
    if target is not None:
        old = [one for one in read(target) if one["status"] != "not-run" or made[0]["status"] == "not-run"]
        measured = made[0]["status"] != "not-run" or all(one["point"] != asked.point for one in old)
        write(target, replaced(old, made, key=lambda one: one["point"]) if measured else old)
    return int(any(one["status"] == "failed" for one in made))


if __name__ == "__main__":
    sys.exit(main())
