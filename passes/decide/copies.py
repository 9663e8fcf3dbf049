"""Whether it pays that several stages hold a copy of a parameter (see `tied`).

Kept together, a parameter that is read at distant places makes one slow stage of all that lies between; copies cost an
all-reduce of its gradient once a step over the ranks that hold one (nothing where these are one rank, as the first and
the last stage of "zbv"). Compared are the predicted times of a whole step: the slowest stage's share of every
microbatch, the bubble, and the exchange. All copies are tried, then all but those of one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snnpart import schedules
from snnpart.errors import PlanError
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.memory import mb
from snnpart.passes.decide.parts import is_tensor_read, key_of
from snnpart.passes.decide.tied import MADE_BY, find_copies, separate
from snnpart.passes.rewrite.shard_channels import local_tensors

if TYPE_CHECKING:
    from snnpart.passes.decide.stages import DecideStages

MOST = 8
"""Parameters that are tried one after the other; more are taken all or none."""


@dataclass(frozen=True)
class _Way:
    """One choice of parameters with copies: their stages, the predicted time of a step and of the exchange in it."""

    stages: dict[str, tuple[int, ...]]
    step_us: float
    exchange_us: float


def best_copies(options: DecideStages, graph: SpikeGraph) -> tuple[str, ...]:
    """The parameters of which several stages shall hold a copy. The graph's notes say why.

    Raises:
        PlanError: no cut can be made, with copies or without.
    """
    names = tuple(find_copies(graph))
    if not names:
        return ()
    together, refusal = _try(options, graph, ())
    best, other = _try(options, graph, names)
    if best is None and together is None:
        raise other or refusal or PlanError("no cut can be made", where=graph.name)
    if best is None or not best.stages:
        return ()
    fewest = _fewest(options, graph, best)
    if together is not None and (not fewest.stages or fewest.step_us >= together.step_us):
        graph.notes[MADE_BY] = _why_not(best, together)
        return ()
    graph.notes[MADE_BY] = _why_apart(graph, fewest, together)
    return tuple(fewest.stages)


def _try(options: DecideStages, graph: SpikeGraph, names: Collection[str]) -> tuple[_Way | None, PlanError | None]:
    """The best cut with copies of these parameters, or why there is none."""
    work = graph.copy()
    separate(work, names)
    try:
        _, stage_of, slowest = options.assign(work)
    except PlanError as error:
        return None, error
    stage = {key: at for part, at in stage_of.items() for key in part.keys}
    reads = [node for node in work.graph.nodes if is_tensor_read(node) and node.target in names]
    held = {name: {stage[key_of(read)] for read in reads if read.target == name} for name in names}
    stages = {name: tuple(sorted(at)) for name, at in held.items() if len(at) > 1}
    exchange = _exchange_us(options, graph, stages)
    return _Way(stages, _step_us(options, slowest) + exchange, exchange), None


def _fewest(options: DecideStages, graph: SpikeGraph, best: _Way) -> _Way:
    """The same without copies that do not pay."""
    for name in tuple(best.stages) if len(best.stages) <= MOST else ():
        fewer, _ = _try(options, graph, [other for other in best.stages if other != name])
        if fewer is not None and fewer.step_us <= best.step_us:
            best = fewer
    return best


def _step_us(options: DecideStages, slowest: float) -> float:
    """A step whose slowest stage takes so long for the whole batch: m microbatches and the bubble between them."""
    per_rank, ranks, many = options.per_rank, options.ranks, max(options.microbatches, 1)
    return slowest * (per_rank + (ranks - 1) / many)


def _exchange_us(options: DecideStages, graph: SpikeGraph, stages: Mapping[str, Sequence[int]]) -> float:
    """One all-reduce for each set of ranks that hold copies, of the gradients of their parameters."""
    cut = {name for name, local in local_tensors(graph).items() if not local.partial_gradient}
    sizes: dict[frozenset[int], float] = {}
    for name, at in stages.items():
        tensor, share = graph.tensors[name].tensor, 1 / options.tp if name in cut else 1.0
        ranks = frozenset(schedules.rank_of_stage(options.schedule, options.ranks, stage) for stage in at)
        if len(ranks) > 1 and tensor.requires_grad:
            sizes[ranks] = sizes.get(ranks, 0.0) + tensor.numel() * tensor.element_size() * share
    return sum(options.profile.all_reduce_us("pp", size, len(ranks)) for ranks, size in sizes.items())


def _why_apart(graph: SpikeGraph, best: _Way, together: _Way | None) -> str:
    """What the report says of copies."""
    lines = [f"{name} ({_size(graph, name)}) is held by the stages {_list(at)}" for name, at in best.stages.items()]
    other = "no cut was possible" if together is None else f"it would take {together.step_us:.0f} us"
    end = f"a step takes {best.step_us:.0f} us, {best.exchange_us:.0f} of them to sum the gradients of copies"
    return "\n".join([*lines, f"{end}; in one stage {other}"])


def _why_not(best: _Way, together: _Way) -> str:
    """What the report says of parameters that could be copied and are not."""
    names = ", ".join(best.stages)
    return f"{names} in one stage: a step takes {together.step_us:.0f} us, with copies {best.step_us:.0f} us"


def _size(graph: SpikeGraph, name: str) -> str:
    tensor = graph.tensors[name].tensor
    return mb(tensor.numel() * tensor.element_size())


def _list(stages: Sequence[int]) -> str:
    return f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"
