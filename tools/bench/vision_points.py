"""What the vision benchmarks measure: networks, topologies, batches, and what is asked for at each point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """GPUs, and the options of the two sides' scripts. `peers`: the peer's modes there, the best one first. `copies`:
    data-parallel ranks, which share the global batch; `stages`: of a pipeline."""

    gpus: int
    shared: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    peers: tuple[tuple[str, tuple[str, ...]], ...] = (("eager", ()),)
    copies: int = 1
    stages: int = 1


FSDP, TP2, PP2 = ("--dp", "fsdp2"), ("--tp", "2"), ("--pp", "2")
TOPOLOGIES = {
    "1GPU": Topology(1, peers=(("cuda_graph", ("--mode", "cuda_graph")), ("eager", ()))),
    "DDP2": Topology(2, copies=2),
    "FSDP2": Topology(2, FSDP, copies=2),
    "TP2": Topology(2, TP2),
    "PP2": Topology(2, PP2, stages=2),
    "DDP4": Topology(4, copies=4),
    "FSDP4": Topology(4, FSDP, copies=4),
    "TP4": Topology(4, ("--tp", "4")),
    "PP4": Topology(4, ("--pp", "4"), stages=4),
    "TP2+DDP2": Topology(4, TP2, copies=2),
    "TP2+FSDP2": Topology(4, (*TP2, *FSDP), copies=2),
    "PP2+DDP2": Topology(4, PP2, copies=2, stages=2),
    "PP2+FSDP2": Topology(4, (*PP2, *FSDP), copies=2, stages=2),
    "TP2+PP2": Topology(4, (*TP2, *PP2), stages=2),
}


@dataclass(frozen=True)
class Point:
    """One network on one topology at a global batch. `least`: how many times the peer's throughput is asked for, by the
    peer's mode; `memory`: at most this share of the peer's memory; `microbatches`: of both sides' pipelines."""

    model: str
    topology: str
    batch: int
    least: tuple[tuple[str, float], ...] = ()
    memory: float | None = None
    size: int = 128
    microbatches: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.topology} G={self.batch}"

    @property
    def gpus(self) -> int:
        return TOPOLOGIES[self.topology].gpus

    def options(self, ours: bool) -> list[str]:
        """The options of one side's script, but for the peer's mode."""
        chosen = TOPOLOGIES[self.topology]
        rest = [*chosen.shared, *(chosen.ours if ours else ())]
        if chosen.stages > 1:
            rest += ["--microbatches", str(self.microbatches or self._fastest_microbatches(ours))]
        return ["--model", self.model, "--batch", str(self.batch // chosen.copies), "--size", str(self.size), *rest]

    def _fastest_microbatches(self, ours: bool) -> int:
        """The peer is fastest with one microbatch at a small batch, and needs several at a large one."""
        stages = TOPOLOGIES[self.topology].stages
        if self.batch <= 32:
            return stages if ours else 1
        return 4 * stages if ours else 2 * stages


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
