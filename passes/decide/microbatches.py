"""How many microbatches a batch is cut into: what the user asked for, the schedule takes, and BatchNorm allows.

`batchnorm="full"`: BatchNorm's statistics are those of the whole batch of a data-parallel rank. No microbatch can pass
the first BatchNorm of a stage before all of them have come so far, so the pipeline would run stage after stage however
the batch is cut; it runs as one microbatch then. A schedule whose point is several microbatches in flight (all but
GPipe) refuses it.
"""

from __future__ import annotations

from snnpart import ops, schedules
from snnpart.errors import ConfigError, PlanError
from snnpart.graph import SpikeGraph

BATCHNORM = ("microbatch", "full")


def decide_microbatches(
    graph: SpikeGraph, *, asked: int | None, schedule: str, pp: int, batchnorm: str = "microbatch"
) -> tuple[int, tuple[str, ...]]:
    """The number of microbatches, and notices where it is not the wanted one.

    Raises:
        ConfigError: `batchnorm` is not known.
        PlanError: the user fixed a number, or a schedule, that `batchnorm="full"` cannot have.
    """
    if batchnorm not in BATCHNORM:
        raise ConfigError(f"batchnorm={batchnorm!r} is not known", choices=BATCHNORM)
    if batchnorm == "full" and normalises_batches(graph):
        return _whole_batch(graph, asked, schedule, pp)
    if asked is not None:
        return asked, ()
    count = schedules.nearest(schedule, pp, pp)
    changed = f"{count} microbatches instead of {pp}: schedule={schedule!r} runs rounds of the same size"
    return count, (changed,) if count != pp else ()


def _whole_batch(graph: SpikeGraph, asked: int | None, schedule: str, pp: int) -> tuple[int, tuple[str, ...]]:
    if schedule != "gpipe" and pp > 1:
        raise PlanError(
            f'batchnorm="full" needs the whole batch at each BatchNorm, schedule={schedule!r} keeps several '
            "microbatches on their way",
            where=graph.name,
            fix='take schedule="gpipe", or batchnorm="microbatch" (statistics of each microbatch, as in gradient '
            "accumulation)",
        )
    if asked is not None and asked > 1:
        raise PlanError(
            f'batchnorm="full" runs the batch as one microbatch, not as {asked}',
            where=graph.name,
            fix='leave microbatches out, or take batchnorm="microbatch"',
        )
    return 1, ('batchnorm="full": the batch runs as one microbatch, stage after stage',) if pp > 1 else ()


def normalises_batches(graph: SpikeGraph) -> bool:
    """Whether the network has a BatchNorm, in a loop over time too."""
    called = any(node.target in (ops.batch_norm, ops.batch_norm_copies) for node in graph.graph.nodes)
    return called or any(name.rpartition(".")[2] == "running_mean" for name in graph.tensors)
