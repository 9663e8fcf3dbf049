"""The rows of the topology table about the spiking language model of 1.41 billion parameters.

Fourteen topologies at G = 8 sequences of 128 tokens. The peer (`distributed.llm`, on Megatron-Core) goes through a
batch one sequence at a time, as the published table does; ours takes a data-parallel rank's sequences at once, in a
pipeline one a microbatch. The sweep has no accumulation on either side. snnpart has no context parallelism: those rows
say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.bench.topology_points import TOKENS, Case, Settings, Sweep

NETWORK = "SpikeLM-1.41B"
BATCH = 8
AXES = ("tp", "pp", "cp", "dp")
TOPOLOGIES = (
    "DP2", "TP2", "PP2", "CP2", "DP4", "TP4", "PP4", "CP4",
    "TP2+DP2", "PP2+DP2", "CP2+DP2", "TP2+PP2", "TP2+CP2", "PP2+CP2",
)  # fmt: skip
SWEPT = ("DP2", "DP4", "TP4", "PP4", "CP4")
PEER = "llm"


def axes(topology: str) -> dict[str, int]:
    """Ranks along each axis: "TP2+DP2" has tp = dp = 2."""
    sizes = dict.fromkeys(AXES, 1)
    for part in topology.split("+"):
        sizes[part[:2].lower()] = int(part[2:])
    return sizes


def case(section: str, topology: str, batch: int, micro: int, settings: Settings) -> Case:
    """`micro`: sequences that the peer's data-parallel rank takes at once."""
    sizes = axes(topology)
    gpus = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
    each = batch // sizes["dp"]
    shared = [word for axis in ("tp", "pp") for word in (f"--{axis}", str(sizes[axis]))]
    small = ["--small"] if settings.quick else []
    sides, missing = {}, {}
    if sizes["cp"] == 1:
        parts = ["--microbatches", str(each)] if sizes["pp"] > 1 else []
        sides["ours"] = ("spikelm_ours.py", "--batch", str(each), *shared, *parts, *small, "--device", settings.device)
    else:
        missing["ours"] = "snnpart has no context parallelism"
    if settings.checkout is None:
        missing[PEER] = "its model is in SpikingJelly's repository, give --spikingjelly CHECKOUT"
    else:
        words = ("--batch", str(batch), "--micro", str(micro), *shared, "--cp", str(sizes["cp"]))
        sides[PEER] = ("spikelm_peer.py", *words, "--checkout", settings.checkout)
    return Case(section, NETWORK, topology, batch, gpus, sides, missing, TOKENS)


def language_cases(settings: Settings) -> Iterator[Case]:
    for topology in TOPOLOGIES:
        yield case("spikelm", topology, BATCH, 1, settings)


def language_sweeps(settings: Settings) -> Iterator[Sweep]:
    def made(topology: str) -> Callable[[int], Case]:
        return lambda each: case("spikelm-sweep", topology, each * axes(topology)["dp"], each, settings)

    for topology in SWEPT:
        yield Sweep("spikelm-sweep", NETWORK, topology, axes(topology)["dp"], 1, made(topology))
