"""What the options of kernels change, on one GPU: memory and speed of SEW-ResNet34, the option beside its default.

    python tools/bench/kernel_options.py             batch 128, 128x128 images, bfloat16, captured steps
    python tools/bench/kernel_options.py --quick     two tiny steps on the CPU

    saved="packed"     train steps that keep spikes as bits
    fuse="auto"        train steps whose fused neurons run in the way that is fastest here
    numerics="fold"    evaluations with BatchNorm in the convolutions before it

Option and default are measured in turn, each launched anew; peak memory is the allocator's largest reservation since
the launch (on the CPU there is none). The CSV is docs/results/kernel_options.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import parallelize  # noqa: E402
from tools.bench import rows as results  # noqa: E402
from tools.bench.rows import Row, read, replaced, write  # noqa: E402
from tools.bench.side import rate  # noqa: E402
from tools.bench.vision_models import CLASSES, network  # noqa: E402

MODEL = "SEW-ResNet34"
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    'saved="packed"': ({"saved": "packed"}, {"saved": "plain"}, True),
    'fuse="auto"': ({"fuse": "auto"}, {"fuse": True}, True),
    'numerics="fold"': ({"numerics": "fold"}, {"numerics": "exact"}, False),
}
"""The option, its default, and whether train steps are measured."""


def measured(asked: argparse.Namespace, given: dict[str, Any], trains: bool) -> tuple[float, float]:
    """Images/s and peak GiB of a program that is launched anew."""
    torch.manual_seed(0)
    gpu = asked.device == "cuda"
    x, y = torch.randn(asked.batch, 3, asked.size, asked.size), torch.randint(0, CLASSES, (asked.batch,))
    x, y = (x.pin_memory(), y.pin_memory()) if gpu else (x, y)
    how = {"fuse": True, "channels_last": True, **given}
    program = parallelize(network(MODEL, asked.size), example_inputs=x[:2], input_layout="NCHW", verify="off", **how)
    _forget(gpu)
    running: Any = program.launch(
        (lambda params: torch.optim.AdamW(params, lr=1e-3)) if trains else None,
        device=asked.device,
        precision="bf16" if gpu else "fp32",
    )
    with running:
        step = (lambda: running.train_step(x, y, F.cross_entropy)) if trains else (lambda: running.eval_step(x))
        images = _rate(step, running, asked)
        memory = torch.cuda.max_memory_reserved() / 2**30 if gpu else 0.0
    return images, memory


def _forget(gpu: bool) -> None:
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _rate(step: Callable[[], Any], running: Any, asked: argparse.Namespace) -> float:
    for _ in range(asked.warm):
        step()
    running.settle()
    found = rate(lambda _: step(), asked.batch, asked.steps)
    running.settle()
    return found


def compared(name: str, asked: argparse.Namespace) -> list[Row]:
    """The rows of one option: speed, and memory where it is known."""
    option, default, trains = OPTIONS[name]
    pairs = [(measured(asked, default, trains), measured(asked, option, trains)) for _ in range(asked.repeats)]
    metrics = [("train" if trains else "evaluation", "images/s", 0), ("peak memory reserved", "GiB", 1)]
    return [_row(name, metric, unit, at, pairs, asked) for metric, unit, at in metrics if at == 0 or pairs[0][0][1]]


def _row(name: str, metric: str, unit: str, at: int, pairs: list[Any], asked: argparse.Namespace) -> Row:
    theirs, ours = ([pair[side][at] for pair in pairs] for side in (0, 1))
    a, b = statistics.median(theirs), statistics.median(ours)
    return results.row(
        "kernel_options",
        f"{MODEL} {name} N={asked.batch}",
        metric,
        unit,
        peer_name="snnpart's default",
        peer=f"{a:.5g}",
        ours=f"{b:.5g}",
        ratio=f"{(a / b if at else b / a):.3f}",
        repeats=len(ours),
        spread=f"{(max(ours) - min(ours)) / b:.3f}",
        machine=results.gpus() if asked.device == "cuda" else results.cores(),
        versions=results.versions("spikingjelly"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two tiny steps on the CPU, nothing is written")
    parser.add_argument("--only", choices=OPTIONS, help="one option")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results.RESULTS / "kernel_options.csv")
    asked = parser.parse_args()
    asked.device, asked.size, asked.warm, asked.steps = "cuda", 128, 10, 20
    if asked.quick:
        asked.device, asked.size, asked.warm, asked.steps, asked.batch, asked.repeats = "cpu", 32, 1, 1, 2, 1
    table: list[Row] = []
    for name in [asked.only] if asked.only else OPTIONS:
        table += compared(name, asked)
        if not asked.quick:
            write(asked.output, replaced(read(asked.output), table, key=lambda one: (one["point"], one["metric"])))
    for one in table:
        print(f"{one['point']}: {one['metric']} {one['peer']} -> {one['ours']} {one['unit']} ({one['ratio']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
