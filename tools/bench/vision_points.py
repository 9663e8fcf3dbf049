"""What the vision benchmarks measure: networks, topologies, batches, and what is asked for at each point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """GPUs, and the options of the two sides' scripts. `peers`: the peer's modes there, the best one first."""

    gpus: int
    shared: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    peers: tuple[tuple[str, tuple[str, ...]], ...] = (("eager", ()),)


TOPOLOGIES = {
    "1GPU": Topology(1, peers=(("cuda_graph", ("--mode", "cuda_graph")), ("eager", ()))),
    "DDP2": Topology(2),
    "FSDP2": Topology(2, ("--dp", "fsdp2")),
    "TP2": Topology(2, ("--tp", "2")),
    "PP2": Topology(2, ("--pp", "2")),
}
PIPELINES = {
    # (of the peer, ours): the peer is fastest with one microbatch at a small batch, and needs several at a large one
    "small": (("--microbatches", "1"), ("--microbatches", "2")),
    "large": (("--microbatches", "4"), ("--microbatches", "8")),
}


@dataclass(frozen=True)
class Point:
    """One network on one topology at a global batch. `least`: how many times the peer's throughput is asked for, by the
    peer's mode; `memory`: at most this share of the peer's memory."""

    model: str
    topology: str
    batch: int
    least: tuple[tuple[str, float], ...] = ()
    memory: float | None = None
    size: int = 128

    @property
    def name(self) -> str:
        return f"{self.model} {self.topology} G={self.batch}"

    @property
    def gpus(self) -> int:
        return TOPOLOGIES[self.topology].gpus

    def options(self, ours: bool) -> list[str]:
        """The options of one side's script, but for the peer's mode."""
        chosen = TOPOLOGIES[self.topology]
        copies = self.gpus if self.topology in ("DDP2", "FSDP2") else 1
        rest = [*chosen.shared, *(chosen.ours if ours else ())]
        if self.topology == "PP2":
            rest += PIPELINES["small" if self.batch <= 32 else "large"][ours]
        return ["--model", self.model, "--batch", str(self.batch // copies), "--size", str(self.size), *rest]


def training_points() -> Iterator[Point]:
    """The table of the vision runtime; rows on two GPUs first."""
    small = {"DDP2": 18.0, "FSDP2": 30.0, "TP2": 12.0, "PP2": 7.0}
    large = {"DDP2": 5.0, "FSDP2": 6.0, "TP2": 3.5, "PP2": 5.0}
    for topology, least in small.items():
        yield Point("SEW-ResNet34", topology, 32, (("eager", least),))
        yield Point("Spikformer-S", topology, 32, (("eager", 8.0),))
    for topology, least in large.items():
        yield Point("SEW-ResNet34", topology, 512, (("eager", least),))
        yield Point("Spikformer-S", topology, 256, (("eager", 3.5),))
    yield Point("SEW-ResNet34", "1GPU", 32, (("cuda_graph", 3.0), ("eager", 12.0)))
    yield Point("Spikformer-S", "1GPU", 32, (("cuda_graph", 2.5), ("eager", 0.0)))
    for model in ("SEW-ResNet34", "Spikformer-S"):
        yield Point(model, "1GPU", 128, (("cuda_graph", 0.0),), memory=0.6)
