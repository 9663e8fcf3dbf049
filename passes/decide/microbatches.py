"""How many microbatches a batch is cut into, under which schedule: what the user asked for, what a schedule takes, and
what BatchNorm allows.

`batchnorm="full"`: BatchNorm's statistics are those of the whole batch of a data-parallel rank. No microbatch can pass
the first BatchNorm of a stage before all of them have come so far, so the pipeline would run stage after stage however
the batch is cut; it runs as one microbatch then. A schedule whose point is several microbatches in flight (all but
GPipe) refuses it.
"""

from __future__ import annotations

from typing import NamedTuple

from snnpart import ops, schedules
from snnpart.errors import ConfigError, PlanError
from snnpart.graph import SpikeGraph
from snnpart.plan import BATCHNORM


class Chosen(NamedTuple):
    """A schedule and a number of microbatches that go together, and notices where they are not the wanted ones."""

    schedule: str
    microbatches: int
    notices: tuple[str, ...] = ()


def decide_microbatches(
    graph: SpikeGraph, *, asked: int | None, schedule: str | None, pp: int, batchnorm: str = "microbatch"
) -> Chosen:
    """The schedule and the number of microbatches: what the user fixed is kept, what was left open (None) follows.

    Raises:
        ConfigError: `batchnorm` or `schedule` is not known.
        PlanError: the user fixed a number and a schedule that do not go together, or that `batchnorm="full"` cannot
            have.
    """
    if batchnorm not in BATCHNORM:
        raise ConfigError(f"batchnorm={batchnorm!r} is not known", choices=BATCHNORM)
    if batchnorm == "full" and normalises_batches(graph):
        return _whole_batch(graph, asked, schedule, pp)
    if asked is None:
        return _nearest(schedule or schedules.default(pp, pp), pp)
    if schedule is None:
        return _able(asked, pp)
    schedules.check(schedule, pp, asked)
    return Chosen(schedule, asked)


def _nearest(schedule: str, pp: int) -> Chosen:
    """One microbatch a rank, or the number next to it that the schedule runs."""
    count = schedules.nearest(schedule, pp, pp)
    changed = f"{count} microbatches instead of {pp}: schedule={schedule!r} runs rounds of the same size"
    return Chosen(schedule, count, (changed,) if count != pp else ())


def _able(asked: int, pp: int) -> Chosen:
    """The schedule for a number of microbatches that the user fixed."""
    schedule = schedules.default(pp, asked)
    missing = schedules.why_not("1f1b", pp, asked)
    return Chosen(schedule, asked, (f"schedule={schedule!r}: 1F1B {missing}",) if missing else ())


def _whole_batch(graph: SpikeGraph, asked: int | None, schedule: str | None, pp: int) -> Chosen:
    if schedule not in (None, "gpipe") and pp > 1:
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
    notices = ('batchnorm="full": the batch runs as one microbatch, stage after stage',) if pp > 1 else ()
    return Chosen(schedule or "gpipe", 1, notices)


def normalises_batches(graph: SpikeGraph) -> bool:
    """Whether the network has a BatchNorm, in a loop over time too."""
    called = any(node.target in (ops.batch_norm, ops.batch_norm_copies) for node in graph.graph.nodes)
    return called or any(name.rpartition(".")[2] == "running_mean" for name in graph.tensors)
