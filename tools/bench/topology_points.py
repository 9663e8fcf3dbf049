"""What the topology table measures: cases in which the peer and ours take turns, and sweeps for the largest batch.

Sections, after the tables that SpikingJelly publishes for four GPUs:

- `table`: both networks on the fourteen topologies at one global batch, G = 32.
- `train-sweep`, `eval-sweep`: the largest batch of one GPU and of the four pure topologies on four, in training at
  128x128 and in evaluation at 224x224, there with four microbatches on both sides.
- `scaling`: data parallelism from one to four GPUs at 256 images each, G = 1024 on four.
- `spikelm`, `spikelm-sweep`: the language model of 1.41 billion parameters at G = 8 on its fourteen topologies, and its
  largest batch without accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tools.bench.vision_models import NAMES
from tools.bench.vision_points import TOPOLOGIES, Point
from tools.bench.vision_rows import RATE

SECTIONS = ("table", "scaling", "train-sweep", "eval-sweep", "spikelm", "spikelm-sweep")
SWEPT = ("1GPU", "DDP4", "FSDP4", "TP4", "PP4")
SCALED = {"1GPU": 1, "DDP2": 2, "FSDP2": 2, "DDP4": 4, "FSDP4": 4}
EACH = 256
"""Images on each GPU in the rows of scaling."""
TOKENS = "tokens_per_second"
PER_SECOND = {RATE: "images/s", TOKENS: "tokens/s"}


@dataclass(frozen=True)
class Settings:
    """What the rows of one run have in common. `images`: of evaluations, as the scripts take it; None: random ones.
    `checkout`: of SpikingJelly's repository. `first`: images of one rank with which sweeps begin."""

    images: str | None = "digits"
    device: str = "cuda"
    quick: bool = False
    checkout: str | None = None
    first: int = 32

    def size(self, asked: int) -> int:
        return 32 if self.quick else asked


@dataclass(frozen=True)
class Case:
    """One batch on one topology. `sides`: script and options of ours ("ours") and of the peer's modes; `missing`: why a
    side has none."""

    section: str
    network: str
    topology: str
    batch: int
    gpus: int
    sides: Mapping[str, tuple[str, ...]] = field(hash=False)
    missing: Mapping[str, str] = field(default_factory=dict, hash=False)
    rate: str = RATE

    @property
    def name(self) -> str:
        return f"{self.section} {self.network} {self.topology} G={self.batch}"

    @property
    def modes(self) -> list[str]:
        """Of the peer, the best one first."""
        return [side for side in {**self.sides, **self.missing} if side != "ours"]

    @property
    def seconds_a_step(self) -> float:
        """A guess on the slow side, for the plan only."""
        each = 1 / 1500 if self.rate == RATE else 0.5
        return max(0.1, self.batch * each / self.gpus)


@dataclass(frozen=True)
class Sweep:
    """The batch of each data-parallel rank is raised until it does not fit. `case`: that of one such batch."""

    section: str
    network: str
    topology: str
    copies: int
    first: int
    case: Callable[[int], Case] = field(hash=False)

    @property
    def prefix(self) -> str:
        return f"{self.section} {self.network} {self.topology}"

    @property
    def name(self) -> str:
        """Of the row with the result."""
        return f"{self.prefix} largest"

    @property
    def gpus(self) -> int:
        return self.case(self.first).gpus


def vision_case(section: str, point: Point, settings: Settings, *options: str, modes: int | None = None) -> Case:
    """A point of the vision benchmarks; `modes` keeps that many of the peer's, counted from the last one.

    In a sweep the peer loads its data in its own process: batches of worker processes lie in shared memory, which is
    small in a container, and the time of loading is not counted.
    """
    peers = TOPOLOGIES[point.topology].peers[-modes if modes else 0 :]
    ours = ("vision_ours.py", *point.options(ours=True), *options, "--device", settings.device)
    loading = ("--workers", "0") if section.endswith("sweep") else ()
    theirs = ("vision_peer.py", *point.options(ours=False), *options, *loading)
    sides, missing = {"ours": ours}, {}
    for mode, extra in peers:
        if settings.device == "cuda":
            sides[mode] = (*theirs, *extra)
        else:
            missing[mode] = "its trainer needs CUDA"
    return Case(section, point.model, point.topology, point.batch, point.gpus, sides, missing)


def table(settings: Settings) -> Iterator[Case]:
    for model in NAMES:
        for topology in TOPOLOGIES:
            yield vision_case("table", Point(model, topology, 32, size=settings.size(128)), settings)


def scaling(settings: Settings) -> Iterator[Case]:
    """Against the peer's eager mode on one GPU: its CUDA graph has no data parallelism."""
    for model in NAMES:
        for topology, gpus in SCALED.items():
            point = Point(model, topology, EACH * gpus, size=settings.size(128))
            yield vision_case("scaling", point, settings, modes=1)


def vision_sweep(evaluate: bool, settings: Settings) -> Iterator[Sweep]:
    section = "eval-sweep" if evaluate else "train-sweep"
    images = ("--images", settings.images) if settings.images else ()
    options = ("--evaluate", *images) if evaluate else ()

    def made(model: str, topology: str) -> Callable[[int], Case]:
        def case(each: int) -> Case:
            batch = each * TOPOLOGIES[topology].copies
            size, parts = settings.size(224 if evaluate else 128), 4 if evaluate else None
            return vision_case(section, Point(model, topology, batch, (), None, size, parts), settings, *options)

        return case

    for model in NAMES:
        for topology in SWEPT:
            yield Sweep(section, model, topology, TOPOLOGIES[topology].copies, settings.first, made(model, topology))
