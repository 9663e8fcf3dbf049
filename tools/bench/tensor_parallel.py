"""What tensor parallelism sends: bytes a rank and step, counted from the peer's program and from ours.

    python tools/bench/tensor_parallel.py            SEW-ResNet34 and Spikformer at the peer's batch, tp 2 and 4
    python tools/bench/tensor_parallel.py --quick    SEW-ResNet34 with tp=2 on small images

The peer is SpikingJelly's own builders: its model runs forward and backward on the meta device, one rank of a process
group that only counts. Ours is the plan that sends least (every layer sharded; a machine whose time is its bytes),
counted from the collectives of the compiled program. Both in bfloat16, T=4, with the traffic of ring algorithms: an
all-reduce of n bytes over p ranks sends 2 (p-1)/p n, a gather or reduce-scatter (p-1)/p n. Writes
docs/results/tensor_parallel.csv (--quick writes nothing unless --output says where).
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import parallelize  # noqa: E402
from snnpart.costs import Link, MachineProfile  # noqa: E402
from snnpart.report.data import CollectiveRow  # noqa: E402

COLUMNS = (
    "bench", "point", "metric", "unit", "peer_name", "peer", "ours", "ratio", "repeats", "spread", "machine",
    "versions", "status", "note",
)  # fmt: skip
BYTES = MachineProfile(
    name="bytes",
    flops={"float32": 1e30, "bfloat16": 1e30},
    copy=1e30,
    launch_us=1e-9,
    links={axis: Link(1e6, 0.0) for axis in ("tp", "pp", "dp")},
    source="a machine on which only what is sent takes time: one byte a microsecond",
)
LEAST = {"inference": 8.0, "training": 1 / 0.6}
"""How many times less is asked for."""


@dataclass(frozen=True)
class Point:
    """A network of the peer: its configuration, at a batch and an image size."""

    name: str
    config: Callable[[int], Any]
    batch: int
    size: int


def sew_resnet34(size: int) -> Any:
    from spikingjelly.activation_based.model.sew_resnet import SEWResNet34Config

    return SEWResNet34Config(time_steps=4, num_classes=1000, step_mode="m", image_size=size)


def spikformer(size: int) -> Any:
    from spikingjelly.activation_based.model.spikformer import SpikformerConfig

    return SpikformerConfig(time_steps=4, num_classes=1000, step_mode="m", image_height=size, image_width=size)


def points(quick: bool) -> list[tuple[Point, int]]:
    """The networks with the numbers of tp ranks."""
    if quick:
        return [(Point("sew_resnet34", sew_resnet34, 2, 32), 2)]
    nets = [Point("sew_resnet34", sew_resnet34, 32, 128), Point("spikformer", spikformer, 32, 128)]
    return [(net, tp) for net in nets for tp in (2, 4)]


class Ring:
    """A process group of `ranks` ranks that sends nothing and counts what a ring would."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, 0.0

    def all_reduce(self, x: Tensor, *_: Any, **__: Any) -> None:
        self.sent += 2 * (self.ranks - 1) / self.ranks * x.numel() * x.element_size()


@contextmanager
def counting(ring: Ring) -> Iterator[None]:
    """torch.distributed as one rank of the ring sees it."""
    replaced = {
        "get_world_size": lambda group=None: ring.ranks,
        "get_rank": lambda group=None: 0,
        "all_reduce": ring.all_reduce,
    }
    with patch.multiple("torch.distributed", **replaced):
        yield


def peer_bytes(point: Point, tp: int, training: bool) -> float:
    """What one rank of the peer's program sends in a step."""
    config, ring = point.config(point.size), Ring(tp)
    with counting(ring):
        model = config.get_builder_cls()(config).build(
            process_group=ring,
            memopt_process_group=None,
            pipeline_rank=0,
            pipeline_size=1,
            pipeline_microbatches=1,
            device=torch.device("cpu"),
            micro_batch_size=point.batch,
            memopt_level=0,
            memopt_compress_inputs=False,
            memopt_checkpoint_budget="balanced",
        )[0]
        model = model.to(device="meta", dtype=torch.bfloat16).train(training)
        x = torch.empty(4, point.batch, 3, point.size, point.size, dtype=torch.bfloat16, device="meta")
        with torch.set_grad_enabled(training):
            out = model(x)
        if training:
            out.float().sum().backward()
    return ring.sent


def our_bytes(point: Point, tp: int, training: bool) -> tuple[float, str]:
    """What one rank of our program sends in a step, and what its collectives are."""
    config = point.config(point.size)
    model: nn.Module = config.get_builder_cls()(config)._build_canonical_model()
    model = model.to(torch.bfloat16).train(training).requires_grad_(training)
    x = torch.rand(4, point.batch, 3, point.size, point.size).to(torch.bfloat16)
    program = parallelize(
        model, tp=tp, example_inputs=x, input_layout="TNCHW", shard="max", verify="off", profile=BYTES
    )
    rows = program.report().collectives
    kinds = [row.operation for row in rows]
    found = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return sum(ring_bytes(row, tp) for row in rows), found


def ring_bytes(row: CollectiveRow, tp: int) -> float:
    """What a rank sends for one collective, forward and backward."""
    times = 2 if row.operation in ("all_reduce", "grad_all_reduce") else 1
    return times * (tp - 1) / tp * (row.forward_bytes + row.backward_bytes)


def measure(point: Point, tp: int, mode: str) -> dict[str, Any]:
    """One row of the table."""
    training = mode == "training"
    peer = peer_bytes(point, tp, training)
    ours, note = our_bytes(point, tp, training)
    ratio = peer / ours
    return {
        "bench": "tensor_parallel",
        "point": f"{point.name}, tp={tp}, batch {point.batch}, {point.size}x{point.size}, {mode}",
        "metric": "bytes sent per rank and step",
        "unit": "MB",
        "peer_name": "SpikingJelly builder",
        "peer": f"{peer / 1e6:.3f}",
        "ours": f"{ours / 1e6:.3f}",
        "ratio": f"{ratio:.2f}",
        "repeats": 1,
        "spread": 0,
        "machine": platform.machine(),
        "versions": versions(),
        "status": "ok" if ratio >= LEAST[mode] else "failed",
        "note": note if ratio >= LEAST[mode] else f"less than {LEAST[mode]:.2f} times fewer: {note}",
    }


def versions() -> str:
    from importlib.metadata import version

    return f"torch {torch.__version__}, spikingjelly {version('spikingjelly')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small point; writes no file")
    parser.add_argument("--output", type=Path, help="the CSV to write")
    options = parser.parse_args()
    target = options.output or (None if options.quick else ROOT / "docs/results/tensor_parallel.csv")
    rows = []
    for point, tp in points(options.quick):
        for mode in LEAST:
            rows.append(measure(point, tp, mode))
            print("{point}: peer {peer} MB, ours {ours} MB, {ratio} times fewer, {status}".format(**rows[-1]))
    if target is not None:
        with target.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
