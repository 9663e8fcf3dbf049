"""Tensor parallelism: what is sent, how long deciding takes, predicted against measured times, speed over a slow link.

    python tools/bench/tensor_parallel.py                     all parts (about nine minutes on two cores)
    python tools/bench/tensor_parallel.py --parts bytes       one of: bytes, placement, prediction, speed
    python tools/bench/tensor_parallel.py --parts speed prediction --device cuda      on two GPUs
    python tools/bench/tensor_parallel.py --quick             bytes of SEW-ResNet34 with tp=2 on small images, no file
    python tools/bench/tensor_parallel.py --quick --parts speed --device cuda         the race on small images, no file

With --device cuda and fewer than two GPUs, prediction and speed are rows that were not run.

bytes       what a rank sends in a step, counted from the peer's program and from ours (bfloat16, T=4). The peer is
            SpikingJelly's own builders: its model runs forward and backward on the meta device, one rank of a process
            group that only counts. Ours is the plan that sends least, counted from the collectives of the compiled
            program. Both with the traffic of ring algorithms: an all-reduce of n bytes over p ranks sends 2 (p-1)/p n,
            a gather or reduce-scatter (p-1)/p n.
placement   seconds in which the placement of large networks is decided.
prediction  what a training step takes under several plans, predicted and measured (tensor_parallel_predict.py).
speed       images/s of the peer and of ours, in turn (tensor_parallel_speed.py): on the CPU over a link of 1 Gbit/s,
            made of network namespaces and `tc` (which takes root), on CUDA over what joins the GPUs. The short form
            has no throttled link, and its two ranks share a GPU where there is one only (gloo between them).

Rows go into docs/results/tensor_parallel.csv, each part's in the place of its earlier ones, and from there into the
plot.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from rows import gpus  # noqa: E402
from tensor_parallel_nets import NETS  # noqa: E402
from tensor_parallel_peer import TIMED, Point, our_bytes, peer_bytes, sew_resnet34, spikformer  # noqa: E402
from tensor_parallel_plot import draw  # noqa: E402
from tensor_parallel_rows import RANKS, RATE, merge, on_ranks, row  # noqa: E402

from snnpart.compilation import Options, trace_model  # noqa: E402
from snnpart.costs import default_profile  # noqa: E402
from snnpart.graph import SpikeGraph  # noqa: E402
from snnpart.pass_manager import PassManager  # noqa: E402
from snnpart.passes import ANALYZE, REWRITE  # noqa: E402
from snnpart.passes.decide.placement import DecidePlacement  # noqa: E402

LEAST = {"inference": 8.0, "training": 1 / 0.6}
"""How many times less is asked for."""
PEER = "SpikingJelly builder"
BYTES_SENT, DECIDING = "bytes sent per rank and step", "seconds of deciding the placement"
PLAN_TIMES, BEHIND, HITS = "predicted step time", "predicted fastest behind measured fastest", "points predicted right"
SPEED = "images per second"
PLACEMENTS, PLACEMENT_LIMIT = 5, 3.0
CLOSE, PLANS_ASKED, POINTS_ASKED, HITS_ASKED = 0.05, 3, 12, 10
DEVICES = {"cpu": f"2 processes, link of {RATE}", "cuda": "2 GPUs"}
QUICK = ("bytes", "speed")


def points(quick: bool) -> list[tuple[Point, int]]:
    """The networks with the numbers of tp ranks."""
    if quick:
        return [(Point("sew_resnet34", sew_resnet34, 2, 32), 2)]
    nets = [Point("sew_resnet34", sew_resnet34, 32, 128), Point("spikformer", spikformer, 32, 128)]
    return [(net, tp) for net in nets for tp in (2, 4)]


def measure(point: Point, tp: int, mode: str) -> dict[str, Any]:
    """One row of the bytes."""
    training = mode == "training"
    peer = peer_bytes(point, tp, training)
    ours, note = our_bytes(point, tp, training)
    ratio = peer / ours
    return row(
        f"{point.name}, tp={tp}, batch {point.batch}, {point.size}x{point.size}, {mode}",
        BYTES_SENT,
        "MB",
        ours / 1e6,
        peer_name=PEER,
        peer=peer / 1e6,
        ratio=ratio,
        status="ok" if ratio >= LEAST[mode] else "failed",
        note=note if ratio >= LEAST[mode] else f"less than {LEAST[mode]:.2f} times fewer: {note}",
    )


def bytes_rows(device: str) -> Iterator[dict[str, Any]]:
    for point, tp in points(quick=False):
        for mode in LEAST:
            yield measure(point, tp, mode)


def placement_rows(device: str) -> Iterator[dict[str, Any]]:
    """Lanes, the integer program and writing the facts, the median of some repeats."""
    for name, make in (("SEW-ResNet152", sew_resnet152), ("Spikformer-8-768", spikformer_8_768)):
        graph = analysed_graph(make())
        for objective in ("max", "time"):
            seconds = []
            for _ in range(PLACEMENTS):
                work, started = graph.copy(), time.perf_counter()
                DecidePlacement(2, default_profile("h200"), objective=objective).run(work)  # type: ignore[arg-type]
                seconds.append(time.perf_counter() - started)
            middle = statistics.median(seconds)
            yield row(
                f"{name}, tp=2, shard={objective}, {len(graph.graph.nodes)} nodes",
                DECIDING,
                "s",
                middle,
                repeats=PLACEMENTS,
                spread=(max(seconds) - min(seconds)) / middle,
                status="ok" if middle < PLACEMENT_LIMIT else "failed",
                note=f"limit {PLACEMENT_LIMIT:g} s",
            )


def sew_resnet152() -> nn.Module:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import sew_resnet

    model: nn.Module = sew_resnet.sew_resnet152(cnf="ADD", spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(model, "m")
    return model


def spikformer_8_768() -> nn.Module:
    from spikingjelly.activation_based.model.spikformer import Spikformer

    sizes = {"img_size_h": 128, "img_size_w": 128, "embed_dims": 768, "num_heads": 12, "depths": 8}
    return Spikformer(T=4, **sizes)


def analysed_graph(model: nn.Module) -> SpikeGraph:
    """The network at batch 32 of 128 x 128, analysed."""
    images = torch.rand(4, 32, 3, 128, 128)
    graph = trace_model(model, images, Options(tp=2, input_layout="TNCHW", verify="off"), True)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    return graph


def prediction_rows(device: str) -> Iterator[dict[str, Any]]:
    """A row for each plan of each point, one for each point, and one for all of them."""
    found = [point for name in NETS for point in on_ranks(HERE / "tensor_parallel_predict.py", [name, device])]
    hits, errors = 0, []
    for point in found:
        plans, best = point["plans"], min(plan["measured"] for plan in point["plans"].values())
        label = f"{point['point']}{_on(device)}"
        for name, plan in plans.items():
            ratio = plan["predicted"] / plan["measured"]
            errors.append(abs(ratio - 1))
            yield row(
                f"{label}, {name}",
                PLAN_TIMES,
                "ms",
                plan["predicted"] / 1e3,
                peer_name="measured step",
                peer=plan["measured"] / 1e3,
                ratio=ratio,
                spread=plan["spread"],
                repeats=point["repeats"],
                machine=machine(device),
                note="ours: predicted; ratio: predicted / measured",
            )
        chosen = min(plans, key=lambda name: plans[name]["predicted"])
        behind = plans[chosen]["measured"] / best - 1
        good = behind <= CLOSE and len(plans) >= PLANS_ASKED
        hits += good
        yield row(
            label,
            BEHIND,
            "%",
            100 * behind,
            machine=machine(device),
            status="ok" if good else "failed",
            note=f"predicted fastest: {chosen}; {len(plans)} plans",
        )
    yield row(
        _hits(len(found), device),
        HITS,
        "points",
        hits,
        machine=machine(device),
        status="ok" if hits >= HITS_ASKED and len(found) >= POINTS_ASKED else "failed",
        note=f"error of predictions: median {statistics.median(errors):.0%}, largest {max(errors):.0%}",
    )


def _hits(count: int, device: str) -> str:
    return f"{count} points, tp=2{_on(device)}"


def _on(device: str) -> str:
    """What ends the points of predictions that were not measured on the CPU, which would have the same names."""
    return "" if device == "cpu" else f", {DEVICES[device]}"


def speed_rows(device: str) -> Iterator[dict[str, Any]]:
    """Images/s on this device."""
    yield from raced(on_ranks(HERE / "tensor_parallel_speed.py", [device], throttled=device == "cpu"), device)


def raced(found: list[dict[str, Any]], device: str, ranks: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of what the two ranks have measured; `ranks` says what they are, if not those of the device."""
    for race in found:
        peer = race["batch"] / race["sides"]["peer"]["seconds"]
        for plan in ("max", "time"):
            side = race["sides"][plan]
            ours = race["batch"] / side["seconds"]
            yield row(
                speed_point(race["point"], ranks or DEVICES[device], race["training"], plan),
                SPEED,
                "images/s",
                ours,
                peer_name=PEER,
                peer=peer,
                ratio=ours / peer,
                repeats=race["repeats"],
                spread=side["spread"],
                machine=machine(device),
                note=f"{side['collectives']} collectives a step, forward and backward",
            )


def quick_rows(parts: Sequence[str], device: str) -> Iterator[dict[str, Any]]:
    """The short form of the parts that have one."""
    if "bytes" in parts:
        ((point, tp),) = points(quick=True)
        yield from (measure(point, tp, mode) for mode in LEAST)
    if "speed" in parts:
        there = torch.cuda.device_count() if device == "cuda" else 0
        ranks = f"2 processes on {min(there, RANKS)} GPUs" if there else "2 processes"
        yield from raced(on_ranks(HERE / "tensor_parallel_speed.py", [device, "quick"]), device, ranks)


def speed_point(label: str, ranks: str, training: bool, plan: str) -> str:
    return f"{label}, {'training' if training else 'inference'}, shard={plan}, {ranks}"


def missing_rows(part: str, device: str) -> Iterator[dict[str, Any]]:
    """The rows of a timed part on a device that is not there."""
    said = {
        "machine": DEVICES[device],
        "status": "not-run",
        "note": f"python tools/bench/tensor_parallel.py --parts {part} --device {device}",
    }
    if part == "prediction":
        yield row(_hits(sum(len(net.batches) for net in NETS.values()), device), HITS, "points", "", **said)
    if part == "speed":
        for point, training in itertools.product(TIMED[device], (False, True)):
            label = speed_point(point.label, DEVICES[device], training, "max")
            yield row(label, SPEED, "images/s", "", peer_name=PEER, **said)


def lacks_gpus(device: str) -> bool:
    """Whether the two ranks would have to share a GPU, or there is none."""
    return device == "cuda" and torch.cuda.device_count() < RANKS


def machine(device: str) -> str:
    """The machine's name in the rows of timed parts."""
    return gpus() if device == "cuda" else f"{platform.machine()}, {DEVICES['cpu'].split(',')[0]}"


PARTS: Mapping[str, tuple[Callable[[str], Iterator[dict[str, Any]]], tuple[str, ...]]] = {
    "bytes": (bytes_rows, (BYTES_SENT,)),
    "placement": (placement_rows, (DECIDING,)),
    "prediction": (prediction_rows, (PLAN_TIMES, BEHIND, HITS)),
    "speed": (speed_rows, (SPEED,)),
}
"""What makes the rows of each part, and the metrics they have."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small point of bytes or speed; writes no file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all, with --quick bytes")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="of the parts prediction and speed")
    parser.add_argument("--output", type=Path, help="the CSV to write")
    options = parser.parse_args(arguments)
    parts: list[str] = options.parts or (["bytes"] if options.quick else list(PARTS))
    if options.quick and not set(parts) <= set(QUICK):
        parser.error(f"--quick has the parts {' and '.join(QUICK)}, not {', '.join(sorted(set(parts) - set(QUICK)))}")
    target = options.output or (None if options.quick else ROOT / "docs/results/tensor_parallel.csv")
    if options.quick:
        _write([_shown(found) for found in quick_rows(parts, options.device)], [], target)
        return 0
    for part in parts:
        _part(part, options.device, target)
    return 0


def _part(part: str, device: str, target: Path | None) -> None:
    """Measure a part, and say which of its rows are missing: those of devices that are not there."""
    timed = part in ("prediction", "speed")
    absent = timed and lacks_gpus(device)
    lacking = [device] if absent else [other for other in DEVICES if other != device]
    missing = [found for other in lacking for found in missing_rows(part, other)]
    make, _ = PARTS[part]
    measured = [] if absent else [_shown(found) for found in make(device)]
    for found in missing if absent else ():
        _shown(found)
    _write(measured, missing, target)


def _shown(found: dict[str, Any]) -> dict[str, Any]:
    print("{point}: {metric}: {ours} {unit} (peer {peer}, ratio {ratio}) {status} {note}".format(**found), flush=True)
    return found


def _write(table: list[dict[str, Any]], missing: list[dict[str, Any]], target: Path | None) -> None:
    """The rows in the place of those with the same metric on the same device, what is missing if it has never been
    measured, and the plot anew."""
    if target is None:
        return
    merge(target, table, missing)
    draw(target)


if __name__ == "__main__":
    raise SystemExit(main())
