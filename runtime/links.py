"""Measures what joins the ranks of an axis: each collective as the runtime carries it out, at several sizes.

The times contain what the cost model must know and a data sheet does not say: the copies around a gather, the packing
of bits, and how gloo reduce-scatters (`collectives`). A size runs a few times in turn on all ranks, behind a barrier;
the slowest rank counts, and of the repeats the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from snnpart.costs import Link, synchronise
from snnpart.runtime.collectives import Axis, gather_over, scatter_sum_over, sum_over

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes of the whole value."""
ROWS = 64
"""Runs of which a rank's piece of a value consists, as the samples of a batch have each their channels."""
REPEATS = 5


def measure_link(
    axis: Axis, device: torch.device | str = "cpu", *, sizes: tuple[int, ...] = SIZES, repeats: int = REPEATS
) -> Link:
    """The link of an axis with several ranks; the same on all of them. Collective.

    `latency_us` and `bandwidth` are those of a ring all-gather through the smallest and the largest size.
    """
    device = torch.device(device)
    measured: dict[str, tuple[tuple[float, float], ...]] = {}
    for kind, work in _works(axis, device).items():
        points = [(float(size), _best(axis, device, work, size // 4, repeats)) for size in sizes]
        measured[f"{kind}/{axis.size}"] = tuple(_rising(points))
    (small, fast), *_, (large, slow) = measured[f"all_gather/{axis.size}"]
    hops = axis.size - 1
    bandwidth = 1e6 * hops * (large - small) / axis.size / max(slow - fast, 1e-3)
    return Link(bandwidth, fast / hops, measured)


def _works(axis: Axis, device: torch.device) -> Mapping[str, Callable[[int], Callable[[], Tensor]]]:
    """For each kind of collective, what makes one of so many float32 elements."""

    def pieces(elements: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        bounds = [rank * elements // axis.size for rank in range(axis.size + 1)]
        return tuple(((bounds[rank], bounds[rank + 1]),) for rank in range(axis.size))

    def summing(elements: int) -> Callable[[], Tensor]:
        x = torch.ones(elements, device=device)
        return lambda: sum_over(x, axis)

    def scattering(elements: int) -> Callable[[], Tensor]:
        x, dealt = torch.ones(ROWS, elements // ROWS, device=device), pieces(elements // ROWS)
        return lambda: scatter_sum_over(x, axis, 1, dealt)

    def gathering(states: tuple[int, int] | None) -> Callable[[int], Callable[[], Tensor]]:
        def make(elements: int) -> Callable[[], Tensor]:
            dealt = pieces(elements // ROWS)
            ((start, stop),) = dealt[axis.index]
            x = torch.ones(ROWS, stop - start, device=device)
            return lambda: gather_over(x, axis, 1, dealt, states)

        return make

    return {
        "all_reduce": summing,
        "reduce_scatter": scattering,
        "all_gather": gathering(None),
        "gather_1_bit": gathering((0, 2)),
        "gather_4_bits": gathering((0, 16)),
    }


def _best(
    axis: Axis, device: torch.device, make: Callable[[int], Callable[[], Tensor]], elements: int, repeats: int
) -> float:
    """Microseconds of the best repeat, on the slowest rank."""
    work = make(elements)
    work()
    found = torch.tensor([_once(axis, device, work) for _ in range(repeats)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=axis.group)
    return float(found.min())


def _once(axis: Axis, device: torch.device, work: Callable[[], Tensor]) -> float:
    dist.all_reduce(torch.zeros(1, device=device), group=axis.group)
    synchronise(device)
    started = time.perf_counter()
    work()
    synchronise(device)
    return 1e6 * (time.perf_counter() - started)


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points with times that do not fall: a small message that was held up does not cost more than a large one."""
    found: list[tuple[float, float]] = []
    lowest = float("inf")
    for size, us in reversed(points):
        lowest = min(lowest, us)
        found.append((size, lowest))
    return found[::-1]
