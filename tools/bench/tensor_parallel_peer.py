"""The peer's networks, and the bytes that its program and ours send in a step."""

from __future__ import annotations

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
sys.path[:0] = [str(ROOT), str(ROOT / "tools/bench")]

from tensor_parallel_predict import BYTES  # noqa: E402

from snnpart import parallelize  # noqa: E402
from snnpart.report.data import CollectiveRow  # noqa: E402


@dataclass(frozen=True)
class Point:
    """A network of the peer: its configuration, at a batch and an image size."""

    name: str
    config: Callable[[int], Any]
    batch: int
    size: int

    @property
    def label(self) -> str:
        return f"{self.name}, tp=2, batch {self.batch}, {self.size}x{self.size}"

    def peer(self, group: Any, batch: int) -> nn.Module:
        """The peer's model for one rank of the group."""
        config = self.config(self.size)
        model: nn.Module = config.get_builder_cls()(config).build(
            process_group=group,
            memopt_process_group=None,
            pipeline_rank=0,
            pipeline_size=1,
            pipeline_microbatches=1,
            device=torch.device("cpu"),
            micro_batch_size=batch,
            memopt_level=0,
            memopt_compress_inputs=False,
            memopt_checkpoint_budget="balanced",
        )[0]
        return model

    def canonical(self) -> nn.Module:
        """The same network on one rank, for us to compile."""
        config = self.config(self.size)
        model: nn.Module = config.get_builder_cls()(config)._build_canonical_model()
        return model


def sew_resnet34(size: int) -> Any:
    from spikingjelly.activation_based.model.sew_resnet import SEWResNet34Config

    return SEWResNet34Config(time_steps=4, num_classes=1000, step_mode="m", image_size=size)


def spikformer(size: int) -> Any:
    from spikingjelly.activation_based.model.spikformer import SpikformerConfig

    return SpikformerConfig(time_steps=4, num_classes=1000, step_mode="m", image_height=size, image_width=size)


TIMED = {
    "cpu": (Point("sew_resnet34", sew_resnet34, 8, 64), Point("spikformer", spikformer, 8, 64)),
    "cuda": (Point("sew_resnet34", sew_resnet34, 32, 128), Point("spikformer", spikformer, 32, 128)),
    "quick": (Point("sew_resnet34", sew_resnet34, 2, 32),),
}
"""What is raced on a device, and in the short form."""


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
    ring = Ring(tp)
    with counting(ring):
        model = point.peer(ring, point.batch)
        model = model.to(device="meta", dtype=torch.bfloat16).train(training)
        x = torch.empty(4, point.batch, 3, point.size, point.size, dtype=torch.bfloat16, device="meta")
        with torch.set_grad_enabled(training):
            out = model(x)
        if training:
            out.float().sum().backward()
    return ring.sent


def our_bytes(point: Point, tp: int, training: bool) -> tuple[float, str]:
    """What one rank of our program sends in a step, and what its collectives are."""
    model = point.canonical().to(torch.bfloat16).train(training).requires_grad_(training)
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
