"""Pipelines on this machine: how even the stages are, how long ranks wait by schedule, what a step sends and holds.

    python tools/bench/pipeline.py                           the CPU's rows: five networks with pp 2, 4, 8 (minutes)
    python tools/bench/pipeline.py --only memory --device cuda    peak memory by schedule; one GPU will do
    python tools/bench/pipeline.py --quick                   one network with pp 2, and two schedules

- *balance*: the slowest stage over the mean, 1 at best. Stages are cut by the network's own measured times
  (`measured_profile`) and then run alone, forward and backward, the best of three. A second measurement of all layers
  says how good the cut is: its slowest stage over that of the best contiguous cut. One of the two must be in its limit.
  With the built-in profile (no measurement) the balance is a row of its own.
- *cut*: seconds of the pass that decides the stages.
- *bytes*: what crosses the boundaries in a step, forward (spikes as bits) and back.
- *bubble*: the share of the ranks' time in which they do not compute, measured on processes that train, beside the
  predicted one. `chain` is a chain of layers that sleep, so that 4 ranks can be measured on 2 cores; `sew_resnet34` has
  its predictions from measured times.
- *memory*: peak bytes of a rank, beside the predicted ones. A run without a GPU leaves the rows of one as they are.

A row replaces the one of its point and metric in the CSV as soon as it is measured; the others stay. No peer cuts these
networks unmodified, so its columns are empty.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import parallelize, schedules, timeline  # noqa: E402
from snnpart.costs import CPU  # noqa: E402
from snnpart.measure import measure_kernels  # noqa: E402
from snnpart.orders import make_schedule  # noqa: E402
from snnpart.passes.analyze.kernels import MeasuredTimes  # noqa: E402
from snnpart.passes.decide.cut import barred, best_cut  # noqa: E402
from snnpart.passes.decide.parts import find_parts  # noqa: E402
from snnpart.passes.decide.places import Places  # noqa: E402
from snnpart.passes.decide.stages import DecideStages  # noqa: E402
from snnpart.program import CompiledProgram  # noqa: E402
from snnpart.runtime.stage import Stage  # noqa: E402
from tools.bench.pipeline_nets import NETS, SMALL, Net  # noqa: E402
from tools.bench.pipeline_ranks import Job, bubble, run_ranks  # noqa: E402
from tools.bench.rows import Row, cores, read, replaced, write  # noqa: E402
from tools.bench.rows import row as any_row  # noqa: E402

BALANCE, NEAR_BEST, CUT_SECONDS, MEMORY = 1.10, 1.05, 2.0, 0.10
MICROBATCHES = 8
PEAK = "peak memory measured"


def measure(compiled: CompiledProgram, x: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each stage alone, of this process's own time."""
    values = {name: info.tensor for name, info in compiled.source.tensors.items()}
    received: list[Tensor] = []
    found = []
    for index in range(compiled.plan.stage_count):
        stage = Stage([compiled.stage(index, 0)], values, torch.device("cpu"))
        bound = stage.bind(compiled, 0)[index]
        times = []
        for _ in range(repeats):
            inputs = [value.detach().requires_grad_(value.requires_grad) for value in received]
            started = time.process_time()
            outputs = stage.forward(bound, [x], inputs, compiled.source.batch)
            roots = [out for out in outputs if out.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(out) for out in roots])
            times.append(time.process_time() - started)
        received = list(outputs)
        found.append(min(times))
    return found


def balance(times: Sequence[float]) -> float:
    """The slowest stage over the mean."""
    return max(times) / statistics.fmean(times)


def above_best(compiled: CompiledProgram, work: np.ndarray, keys: Sequence[Sequence[str]]) -> float:
    """The slowest stage by these times of the parts, over that of the best contiguous cut into as many stages."""
    stage_of = {part.name: stage for (stage, _), p in compiled.stages.items() for part in p.tensors}
    stage_of |= {path: stage for (stage, _), p in compiled.stages.items() for path in p.leaves}
    count, stages = len(work), compiled.plan.stage_count
    own = np.bincount([stage_of[names[0]] for names in keys], weights=work, minlength=stages)
    cuts = best_cut(work, np.zeros(count), barred([None] * count, stages))
    assert cuts is not None  # nothing is pinned
    best = max(work[start:stop].sum() for start, stop in itertools.pairwise([0, *cuts, count]))
    return float(own.max() / best)


def balances(name: str, net: Net, stages: Sequence[int]) -> Iterator[Row]:
    """The rows of one network cut into these numbers of stages."""
    x, _ = net.batch()
    options: dict[str, Any] = {"example_inputs": x, "input_layout": net.layout, "verify": "off"}
    model = net.make()
    whole = parallelize(model, **options)
    profile, source = whole.measured_profile(), whole.compiled.source
    MeasuredTimes(replace(profile, kernels=measure_kernels(source, x))).run(source)
    parts = find_parts(source)
    work = Places.of(source, parts, parts.keyed, 1).work()
    for pp in stages:
        if pp > parts.positions:
            yield row(f"{name} pp={pp}", "balance", "1", None, f"the network has {parts.positions} parts")
            continue
        cut = parallelize(model, pp=pp, microbatches=MICROBATCHES, profile=profile, **options).compiled
        usual = parallelize(model, pp=pp, microbatches=MICROBATCHES, **options).compiled
        times, near = measure(cut, x), above_best(cut, work, [part.keys for part in parts.keyed])
        yield from balance_rows(f"{name} pp={pp}", cut, times, near, measure(usual, x))
        yield from bytes_rows(f"{name} pp={pp}", cut)


def balance_rows(
    label: str, cut: CompiledProgram, times: Sequence[float], near: float, usual: Sequence[float]
) -> Iterator[Row]:
    """Balance of stages that take `times` alone, whose slowest one is `near` times the best cut's."""
    good = balance(times) <= BALANCE or near <= NEAR_BEST
    predicted = [cut.stage(stage, 0).predicted_us for stage in range(cut.plan.stage_count)]
    limit = f"at most {BALANCE:g}, or {NEAR_BEST:g} of the best cut"
    yield row(label, "balance predicted", "1", balance(predicted))
    yield row(label, "balance measured", "1", balance(times), limit, ok=good, repeats=3)
    yield row(label, "slowest stage over best cut's", "1", near, limit, ok=good)
    yield row(label, "balance measured, built-in profile", "1", balance(usual), repeats=3)


def bytes_rows(label: str, compiled: CompiledProgram) -> Iterator[Row]:
    ports = [port for stage in range(compiled.plan.stage_count) for port in compiled.stage(stage, 0).sends]
    whole = sum(port.value.bytes for port in ports)
    yield row(label, "bytes forward", "B", sum(port.wire_bytes for port in ports), f"{whole} unpacked")
    yield row(label, "bytes back", "B", sum(port.value.bytes for port in ports if port.value.requires_grad))


def cut_seconds(name: str, net: Net, pp: int) -> Row:
    """How long the cut of an analysed network takes, of this process's own time."""
    x, _ = net.batch()
    source = parallelize(net.make(), example_inputs=x, input_layout=net.layout, verify="off").compiled.source
    times = []
    for _ in range(3):
        graph = source.copy()
        started = time.process_time()
        DecideStages(pp, CPU).run(graph)
        times.append(time.process_time() - started)
    seconds = statistics.median(times)
    return row(
        f"{name} pp={pp}", "seconds of the cut", "s", seconds, f"limit {CUT_SECONDS:g}", ok=seconds <= CUT_SECONDS,
        repeats=3,
    )  # fmt: skip


def chain_job(pp: int, schedule: str, device: str = "cpu") -> Job:
    """The waiting chain of eight layers, as many on each stage."""
    stages = pp * schedules.stages_per_rank(schedule, pp, 0)
    cuts = tuple(str(8 // stages * i) for i in range(1, stages))
    return Job("chain", pp, schedule, MICROBATCHES, device, split_at=cuts)


def bubbles(pp: int, names: Sequence[str]) -> Iterator[Row]:
    """The waiting chain under each schedule: what the grid says, and what ranks did."""
    for name in names:
        per_rank = schedules.stages_per_rank(name, pp, 0)
        said = timeline.in_ticks(make_schedule(name, pp, MICROBATCHES, per_rank)).bubble
        yield from bubble_rows(f"chain pp={pp} {name}", said, bubble(run_ranks(chain_job(pp, name))))


def real_bubbles(pp: int, names: Sequence[str]) -> Iterator[Row]:
    """SEW-ResNet34 on as many cores, predicted by measured times."""
    cores = os.cpu_count() or 1
    if cores < pp:
        for name in names:
            yield row(
                f"sew_resnet34 pp={pp} {name}", "bubble measured", "1", None, f"needs {pp} cores, here are {cores}"
            )
        return
    x, _ = SMALL.batch()
    part = x[:, : x.shape[1] // MICROBATCHES]
    options: dict[str, Any] = {"input_layout": SMALL.layout, "verify": "off"}
    profile = parallelize(SMALL.make(), example_inputs=part, **options).measured_profile()
    for name in names:
        how = {**options, "pp": pp, "schedule": name, "microbatches": MICROBATCHES, "profile": profile}
        said = timeline.predicted(parallelize(SMALL.make(), example_inputs=x, **how).compiled).bubble
        job = Job("small", pp, name, MICROBATCHES, profile=profile.to_json())
        yield from bubble_rows(f"sew_resnet34 pp={pp} {name}", said, bubble(run_ranks(job)))


def bubble_rows(label: str, said: float, steps: Sequence[float]) -> Iterator[Row]:
    spread = f"{max(steps) - min(steps):.4g}"
    yield row(label, "bubble predicted", "1", said)
    yield row(label, "bubble measured", "1", statistics.median(steps), repeats=len(steps)) | {"spread": spread}


def memory(device: str, names: Sequence[str], before: Sequence[Row]) -> Iterator[Row]:
    """Peak bytes of each of two ranks by schedule: SEW-ResNet34 at 128 x 128, batch 32, its neurons as the framework
    runs them and fused. Without a GPU only what none gave `before` is said to be missing."""
    there = {line["point"] for line in before if line["metric"] == PEAK and line["ours"]}
    for name, fused in itertools.product(names, (False, True)):
        points = [f"sew_resnet34 pp=2 {name}{' fused' if fused else ''} G=32 rank {rank}" for rank in range(2)]
        if device == "cpu":
            command = "needs a GPU: python tools/bench/pipeline.py --only memory --device cuda"
            yield from (row(point, PEAK, "B", None, command) for point in points if point not in there)
            continue
        found = run_ranks(Job("large", 2, name, MICROBATCHES, device, fused=fused))
        for point, times in zip(points, found, strict=True):
            off = times.peak / times.predicted_bytes - 1
            note = f"{off:+.1%} of the predicted, limit {MEMORY:.0%}"
            yield row(point, "peak memory predicted", "B", times.predicted_bytes)
            yield row(point, PEAK, "B", times.peak, note, ok=abs(off) <= MEMORY)


def row(
    label: str, metric: str, unit: str, ours: float | None, note: str = "", ok: bool = True, repeats: int = 1
) -> Row:
    """A row; without a value it was not run."""
    value = "" if ours is None else f"{ours:.6g}"
    status = "not-run" if ours is None else "ok" if ok else "failed"
    said = {"repeats": repeats, "machine": _machine(), "status": status, "note": note}
    return any_row("pipeline", label, metric, unit, ours=value, **said)


def _machine() -> str:
    gpu = f", {torch.cuda.device_count()} {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return cores() + gpu


def rows(options: argparse.Namespace, before: Sequence[Row] = ()) -> Iterator[Row]:
    """All rows that are wanted; `before`: those that the file holds."""
    names = ("gpipe", "zbv") if options.quick else schedules.NAMES
    wanted = options.only or ("balance", "cut", "bubble", "memory")
    nets = {"sew_resnet34": SMALL} if options.quick else NETS
    if "balance" in wanted:
        for name, net in nets.items():
            yield from balances(name, net, (2,) if options.quick else (2, 4, 8))
    if "cut" in wanted and not options.quick:
        yield cut_seconds("sew_resnet152", NETS["sew_resnet152"], 8)
    if "bubble" in wanted:
        for pp in (2,) if options.quick else (2, 4):
            yield from bubbles(pp, names)
            yield from real_bubbles(pp, () if options.quick else names)
    if "memory" in wanted:
        yield from memory(options.device, names, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a row that was measured now missed its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=("balance", "cut", "bubble", "memory"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table: list[Row] = []
    target = options.output or (None if options.quick else ROOT / "docs/results/pipeline.csv")
    before = [] if target is None else read(target)
    for found in rows(options, before):
        table.append(found)
        print(
            f"{found['point']:32} {found['metric']:36} {found['ours']:>12} {found['unit']} {found['note']}", flush=True
        )
        if target is not None:
            write(target, replaced(before, table, lambda line: (line["point"], line["metric"])))
    if target is not None and not options.quick:
        from tools.bench.pipeline_plot import plot

        print(f"wrote {target} and {plot(target)}")
    return int(any(found["status"] == "failed" for found in table))


if __name__ == "__main__":
    sys.exit(main())
