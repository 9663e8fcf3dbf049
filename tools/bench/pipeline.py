"""Pipelines on this machine: how even the stages are, how long ranks wait by schedule, and what a step sends.

    python tools/bench/pipeline.py            SEW-ResNet34 and 152, spiking VGG16 with pp 2, 4, 8 (minutes)
    python tools/bench/pipeline.py --quick    SEW-ResNet34 with pp 2, small images

Balance is the slowest stage over the mean, 1 at best: predicted by the cost model, and measured by running each stage
alone in this process, forward and backward, the best of three. Bubble shares are those of the schedule with the
measured stage times. Writes docs/results/pipeline.csv (--quick only where --output says). No peer cuts these networks
unmodified.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import parallelize, schedules  # noqa: E402
from snnpart.orders import make_schedule  # noqa: E402
from snnpart.program import CompiledProgram  # noqa: E402
from snnpart.runtime.stage import Stage  # noqa: E402
from snnpart.timeline import TICKS, timeline  # noqa: E402

COLUMNS = (
    "bench", "point", "metric", "unit", "peer_name", "peer", "ours", "ratio", "repeats", "spread", "machine",
    "versions", "status", "note",
)  # fmt: skip
LIMIT = 1.10
MICROBATCHES = 8


def sew_resnet(depth: int) -> nn.Module:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import sew_resnet as zoo

    model: nn.Module = getattr(zoo, f"sew_resnet{depth}")(cnf="ADD", spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(model, "m")
    return model


def vgg16() -> nn.Module:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import spiking_vgg

    model: nn.Module = spiking_vgg.spiking_vgg16_bn(spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(model, "m")
    return model


MODELS = {"sew_resnet34": lambda: sew_resnet(34), "sew_resnet152": lambda: sew_resnet(152), "spiking_vgg16": vgg16}


def measure(compiled: CompiledProgram, x: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each stage alone."""
    values = {name: info.tensor for name, info in compiled.source.tensors.items()}
    received: list[Tensor] = []
    found = []
    for index in range(compiled.plan.stage_count):
        stage = Stage([compiled.stage(index, 0)], values, torch.device("cpu"))
        bound = stage.bind(compiled, 0)[index]
        times = []
        for _ in range(repeats):
            inputs = [value.detach().requires_grad_(value.requires_grad) for value in received]
            started = time.perf_counter()
            outputs = stage.forward(bound, [x], inputs, compiled.source.batch)
            roots = [out for out in outputs if out.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(out) for out in roots])
            times.append(time.perf_counter() - started)
        received = list(outputs)
        found.append(min(times))
    return found


def balance(times: Sequence[float]) -> float:
    """The slowest stage over the mean."""
    return max(times) / statistics.fmean(times)


def bubbles(times: Sequence[float], pp: int) -> dict[str, float]:
    """The share of waiting of each schedule with one stage a rank, for stages that take these times."""
    found = {}
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, pp, MICROBATCHES)
        found[name] = timeline(schedule, lambda action: times[action.stage] * TICKS[action.kind]).bubble
    for name in ("interleaved-1f1b", "interleaved-zb", "zbv"):
        per_rank = schedules.stages_per_rank(name, pp, 0)
        schedule = make_schedule(name, pp, MICROBATCHES, per_rank)
        found[f"{name}, equal stages"] = timeline(schedule, lambda action: TICKS[action.kind]).bubble
    return found


def point(name: str, pp: int, size: int) -> list[dict[str, Any]]:
    """The rows of one network cut into pp stages."""
    x = torch.rand(4, 4, 3, size, size)
    started = time.perf_counter()
    program = parallelize(
        MODELS[name](), pp=pp, microbatches=MICROBATCHES, example_inputs=x, input_layout="TNCHW", verify="off"
    )
    seconds = time.perf_counter() - started
    compiled, label = program.compiled, f"{name} pp={pp}"
    predicted = [compiled.stage(stage, 0).predicted_us for stage in range(pp)]
    measured = measure(compiled, x)
    sent = [sum(port.wire_bytes for port in compiled.stage(stage, 0).sends) for stage in range(pp)]
    whole = [sum(port.value.bytes for port in compiled.stage(stage, 0).sends) for stage in range(pp)]
    rows = [
        row(label, "compilation", "s", seconds),
        row(label, "balance predicted", "1", balance(predicted)),
        row(label, "balance measured", "1", balance(measured), LIMIT),
        row(label, "bytes forward", "B", sum(sent), note=f"{sum(whole)} unpacked"),
    ]
    return rows + [row(label, f"bubble {s}", "1", share) for s, share in bubbles(measured, pp).items()]


def row(label: str, metric: str, unit: str, ours: float, limit: float | None = None, note: str = "") -> dict[str, Any]:
    values = dict.fromkeys(COLUMNS, "")
    values |= {
        "bench": "pipeline",
        "point": label,
        "metric": metric,
        "unit": unit,
        "ours": f"{ours:.4g}",
        "repeats": "3" if metric == "balance measured" else "1",
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "versions": f"torch {torch.__version__}, python {platform.python_version()}",
        "status": "ok" if limit is None or ours <= limit else "failed",
        "note": note if limit is None else f"limit {limit:g}",
    }
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pairs = [("sew_resnet34", 2)] if options.quick else [(name, pp) for name in MODELS for pp in (2, 4, 8)]
    table = [found for name, pp in pairs for found in point(name, pp, 32 if options.quick else 128)]
    for found in table:
        print(f"{found['point']:20} {found['metric']:32} {found['ours']:>10} {found['unit']} {found['note']}")
    target = options.output or (None if options.quick else ROOT / "docs/results/pipeline.csv")
    if target is not None:
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
