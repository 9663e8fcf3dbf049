"""The machine in numbers: how long arithmetic, memory traffic, launches and messages take.

A `MachineProfile` is data. It is one of the built-in ones, one measured on this machine, or one given by hand as JSON.
Decisions that several ranks must agree on use the same profile on each, so `default_profile` never looks at what
happens to have been measured here: ask for `measured_profile` to use that.

Time of a kernel follows the roofline: launch + max(flops / flop rate, bytes / copy rate).
Time of a message of b bytes over a link follows latency + b / bandwidth; collectives are counted as rings over n ranks:

    all-reduce                 2 (n-1) (latency + b / n / bandwidth)
    all-gather, reduce-scatter   (n-1) (latency + b / n / bandwidth)     b: bytes of the whole value

A link that was measured over a process group (`runtime.links`) holds times of each collective at several sizes, with
the copies and the packing that come with it; they are interpolated, and they go before the formulas.

Sources of the built-in numbers stand beside them.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from snnpart.errors import ConfigError

VERSION = 1
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "gather_1_bit", "gather_4_bits")
"""Collectives of which a link can hold measured times."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the ranks of one mesh axis: bytes per second each way, and microseconds before the first byte.

    `measured[kind]` are pairs (bytes of the whole value, microseconds) by rising size; kind is one of `KINDS` with the
    number of ranks, as "all_gather/2".
    """

    bandwidth: float
    latency_us: float
    measured: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def measured_us(self, kind: str, ranks: int, size: float) -> float | None:
        """Microseconds of a collective between the measured sizes, or along the last two of them beyond; None if it
        was not measured."""
        points = self.measured.get(f"{kind}/{ranks}", ())
        if len(points) < 2:
            return None
        at = min(max(bisect([bytes_ for bytes_, _ in points], size), 1), len(points) - 1)
        (small, fast), (large, slow) = points[at - 1], points[at]
        return max(fast + (slow - fast) * (size - small) / (large - small), points[0][1])


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """One rank's speed and its links.

    `flops` gives flop/s of matrix products by dtype name (`float32`), `copy` bytes/s read plus written by an
    element-wise kernel, `launch_us` the fixed time of one kernel, `links` the link of each mesh axis. `kernels`:
    microseconds of forward and backward of single operations as they were measured (`snnpart.measure`), by their text;
    `scales`: how many times longer than by the roofline operations of a kind took, forward and backward. `cache`: bytes
    of the last-level cache where it decides how much is computed in one call (0: launches decide). `workspace`: bytes
    that the library of matrix products keeps once it has run forward and backward.
    """

    name: str
    flops: Mapping[str, float]
    copy: float
    launch_us: float
    links: Mapping[str, Link] = field(default_factory=dict)
    kernels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cache: float = 0.0
    workspace: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        rates = {**{f"flops[{key}]": value for key, value in self.flops.items()}, "copy": self.copy}
        bad = {key: value for key, value in rates.items() if not value > 0}
        if bad or not self.flops:
            raise ConfigError(f"the profile '{self.name}' needs positive rates, it has {bad or 'no flops'}")

    def flop_rate(self, dtype: torch.dtype) -> float:
        """flop/s for a dtype; one that is not listed counts as the slowest listed."""
        return self.flops.get(str(dtype).removeprefix("torch."), min(self.flops.values()))

    def kernel_us(self, flops: float, moved: float, dtype: torch.dtype = torch.float32) -> float:
        """Microseconds of one kernel that does `flops` and moves `moved` bytes."""
        return self.launch_us + 1e6 * max(flops / self.flop_rate(dtype), moved / self.copy)

    def send_us(self, axis: str, size: float) -> float:
        """Microseconds to send `size` bytes to a neighbour on `axis`."""
        link = self._link(axis)
        return link.latency_us + 1e6 * size / link.bandwidth

    def all_reduce_us(self, axis: str, size: float, ranks: int) -> float:
        """Microseconds to sum a value of `size` bytes over `ranks` ranks (0 for one rank)."""
        measured = self._link(axis).measured_us("all_reduce", ranks, size)
        return 2 * self._ring_us(axis, size, ranks) if measured is None else measured

    def all_gather_us(self, axis: str, size: float, ranks: int) -> float:
        """Microseconds to gather a value of `size` bytes in all (0 for one rank)."""
        measured = self._link(axis).measured_us("all_gather", ranks, size)
        return self._ring_us(axis, size, ranks) if measured is None else measured

    def reduce_scatter_us(self, axis: str, size: float, ranks: int) -> float:
        """Microseconds to sum a value of `size` bytes over `ranks` ranks that keep a share each (0 for one rank).

        At most those of an all-reduce, which can stand for it.
        """
        measured = self._link(axis).measured_us("reduce_scatter", ranks, size)
        scatter = self._ring_us(axis, size, ranks) if measured is None else measured
        return min(scatter, self.all_reduce_us(axis, size, ranks))

    def gather_bits_us(self, axis: str, elements: int, width: int, size: float, ranks: int) -> float:
        """Microseconds to gather a value of `elements` elements (`size` bytes) as `width` bits each, packing included.

        Packing is a kernel that reads the rank's share, unpacking one that writes the whole value.
        """
        link = self._link(axis)
        one, four = (link.measured_us(kind, ranks, size) for kind in ("gather_1_bit", "gather_4_bits"))
        if one is not None and four is not None:
            return one + (four - one) * (width - 1) / 3
        packed = width * -(-elements // 8)
        return self.all_gather_us(axis, packed, ranks) + self.kernel_us(0.0, size / ranks) + self.kernel_us(0.0, size)

    def _ring_us(self, axis: str, size: float, ranks: int) -> float:
        return (ranks - 1) * self.send_us(axis, size / ranks)

    def _link(self, axis: str) -> Link:
        if axis not in self.links:
            raise ConfigError(
                f"the profile '{self.name}' has no link for the mesh axis '{axis}'", choices=sorted(self.links)
            )
        return self.links[axis]

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MachineProfile:
        """Read a profile; ConfigError names what is unknown or missing."""
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("version", None)
            if version != VERSION:
                raise ConfigError(f"profile version {version!r} is not {VERSION}")
            links = {axis: Link(**_tupled(link)) for axis, link in data.pop("links", {}).items()}
            measured: dict[str, Any] = {
                name: {key: (float(there), float(back)) for key, (there, back) in data.pop(name, {}).items()}
                for name in ("kernels", "scales")
            }
            return cls(links=links, **measured, **data)
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            fields = sorted(cls.__dataclass_fields__)
            raise ConfigError(f"this is not a machine profile: {error}", choices=fields) from error


def _tupled(link: Mapping[str, Any]) -> dict[str, Any]:
    """A link's fields, its measured points as they were before JSON made lists of them."""
    points = {kind: tuple((size, us) for size, us in found) for kind, found in link.get("measured", {}).items()}
    return {**link, "measured": points} if "measured" in link else dict(link)


CPU = MachineProfile(
    name="cpu-2core",
    flops={"float32": 8e10, "float64": 3.3e10, "bfloat16": 1.4e9, "float16": 1.4e9},
    copy=1.2e10,
    launch_us=4.0,
    cache=3.3e7,
    links={"tp": Link(1e9, 150.0), "pp": Link(1e9, 150.0), "dp": Link(1e9, 150.0)},
    source="measure_profile() on one thread of a 2-core x86 virtual machine, torch 2.14; links: gloo over loopback",
)

H200 = MachineProfile(
    name="h200",
    flops={"float32": 4e14, "float64": 5e13, "bfloat16": 7e14, "float16": 7e14},
    copy=4e12,
    launch_us=4.0,
    workspace=2 * 2.0**25,
    links={"tp": Link(3e11, 12.0), "pp": Link(3e11, 12.0), "dp": Link(3e11, 12.0)},
    source="70-80 % of the H200 SXM data sheet: 989 Tflop/s bf16, 495 tf32, 67 f64, 4.8 TB/s, NVLink 450 GB/s each way;"
    " workspace: torch gives cuBLAS 32 MiB in each thread that calls it (CUBLAS_WORKSPACE_CONFIG)",
)

BUILT_IN: Mapping[str, MachineProfile] = {profile.name: profile for profile in (CPU, H200)}


def default_profile(name: str | None = None) -> MachineProfile:
    """A built-in profile: the one named, else `h200` where CUDA is there and `cpu-2core` elsewhere.

    Raises:
        ConfigError: no built-in profile has this name.
    """
    chosen = name or (H200.name if torch.cuda.is_available() else CPU.name)
    if chosen not in BUILT_IN:
        raise ConfigError(f"there is no built-in machine profile '{chosen}'", choices=sorted(BUILT_IN))
    return BUILT_IN[chosen]


def measured_profile(device: str | torch.device = "cpu", *, again: bool = False) -> MachineProfile:
    """The profile of this machine's `device`: read from the user's cache, measured (about a second) when not there."""
    path = _cache_file(torch.device(device))
    if path.exists() and not again:
        return MachineProfile.from_json(path.read_text())
    return kept_profile(measure_profile(device), device)


def kept_profile(profile: MachineProfile, device: str | torch.device = "cpu") -> MachineProfile:
    """Keep the profile in the user's cache, from which `measured_profile` reads it; gives it back."""
    keep(_cache_file(torch.device(device)), profile.to_json())
    return profile


def keep(path: Path, text: str) -> None:
    """Write a file of the cache, whole or not at all: other processes read it and write it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def user_cache() -> Path:
    """The folder in which what was measured on this machine is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snnpart"


def _cache_file(device: torch.device) -> Path:
    return user_cache() / f"profile-{platform.node()}-{device.type}-torch{torch.__version__}.json"


def measure_profile(device: str | torch.device = "cpu") -> MachineProfile:
    """Measure flop rate, copy rate and launch time of `device`; a CPU's cache is what the system says, the links are
    those of the built-in profile."""
    device = torch.device(device)
    known = H200 if device.type == "cuda" else CPU
    size = 4096 if device.type == "cuda" else 512
    rates = {}
    for name in known.flops:
        x = torch.ones(size, size, dtype=getattr(torch, name), device=device)
        rates[name] = 2.0 * size**3 / _seconds(partial(torch.matmul, x, x), device)
    large = torch.ones(1 << (26 if device.type == "cuda" else 22), device=device)
    small = torch.ones(1, device=device)
    return MachineProfile(
        name=f"{platform.node()}-{device.type}",
        flops=rates,
        copy=2.0 * large.nbytes / _seconds(lambda: large + 1, device),
        launch_us=1e6 * _seconds(lambda: small + 1, device),
        links=known.links,
        cache=0.0 if device.type == "cuda" else _last_level_cache(known.cache),
        workspace=known.workspace,
        source=f"measured with torch {torch.__version__}; links of the built-in profile '{known.name}'",
    )


def _last_level_cache(otherwise: float, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Bytes of the last-level cache as Linux says, in files like `index3/level` ("3") and `index3/size` ("32768K")."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = []
    for at in folder.glob("index*"):
        try:
            size = (at / "size").read_text().strip()
            found.append((int((at / "level").read_text()), float(size[:-1]) * units[size[-1:]]))
        except (OSError, ValueError, KeyError):
            continue
    return max(found, default=(0, otherwise))[1]


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 5, burst: int = 4) -> float:
    """The best mean time of one call in a few bursts."""

    def once() -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(burst):
            work()
        synchronise(device)
        return (time.perf_counter() - start) / burst

    once()
    return min(once() for _ in range(repeats))


def synchronise(device: torch.device) -> None:
    """Wait for what the device was given; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
