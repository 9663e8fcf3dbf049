"""The pipeline schedules by name: how many stages a rank holds, where they lie, and which microbatch counts they take.

`loop`: stage s lies on rank s mod pp. `v`: rank r holds the stages r and 2 pp - 1 - r, so that the last stage is where
the first one is and a loss starts its way back without waiting. The order of actions is torch's (`compat`); this file
holds only what must be known before there is an order.

*gpipe* all forwards, then all backwards; *1f1b* one forward, one backward in turn, so that later stages hold fewer
microbatches; *interleaved-1f1b* the same over several stages a rank, which shortens the bubble and sends more;
*interleaved-zb* and *zbv* split the backward into gradients of inputs, which the stage before waits for, and gradients
of weights, which fill the bubble (https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from snnpart.errors import ConfigError, PlanError


@dataclass(frozen=True, slots=True)
class Kind:
    """What a schedule needs: stages a rank (the default, and whether another number can be), where they lie, whether
    there must be a microbatch for each rank, whether microbatches go in rounds of the same size, and whether the
    backward is split in two."""

    per_rank: int = 1
    any_number: bool = False
    placement: Literal["loop", "v"] = "loop"
    fills: bool = False
    rounds: bool = False
    splits: bool = False


KINDS: Mapping[str, Kind] = {
    "gpipe": Kind(),
    "1f1b": Kind(fills=True),
    "interleaved-1f1b": Kind(per_rank=2, any_number=True, rounds=True),
    "interleaved-zb": Kind(per_rank=2, any_number=True, rounds=True, splits=True),
    "zbv": Kind(per_rank=2, placement="v", splits=True),
}
NAMES = tuple(KINDS)


def stages_per_rank(name: str, pp: int, asked: int | None) -> int:
    """Stages a rank: what was asked for, or the schedule's own number; one where pp is 1.

    Raises:
        ConfigError: the schedule does not run with that number.
    """
    kind = KINDS[name]
    if not asked:
        return kind.per_rank if pp > 1 else 1
    if asked == 1 and (pp == 1 or kind.any_number or kind.per_rank == 1):
        return 1
    if pp > 1 and (asked == kind.per_rank or (kind.any_number and asked > 1)):
        return asked
    if pp == 1:
        raise ConfigError(
            f"stages_per_rank={asked} with pp=1: one rank runs one stage", fix="raise pp, or leave it out"
        )
    able = [other for other, k in KINDS.items() if k.any_number or k.per_rank == asked]
    raise ConfigError(
        f"schedule={name!r} runs {kind.per_rank} stage(s) a rank, not {asked}",
        fix=f"leave stages_per_rank out, or take one of the schedules {able}",
    )


def rank_of_stage(name: str, pp: int, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    if KINDS[name].placement == "v" and pp > 1:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


def takes(name: str, pp: int, microbatches: int) -> bool:
    """Whether the schedule runs this number over pp ranks."""
    return not why_not(name, pp, microbatches)


def why_not(name: str, pp: int, microbatches: int) -> str:
    """Why the schedule does not run this number of microbatches; empty where it does.

    1F1B begins with one forward for every stage that follows, which takes a microbatch for each. The interleaved ones
    go in rounds of one size, m // pp of them.
    """
    kind = KINDS[name]
    if kind.fills and microbatches < pp:
        return f"fills its {pp} stages with a microbatch each before the first backward, and {microbatches} are too few"
    if kind.rounds and microbatches % max(1, microbatches // pp):
        return f"runs microbatches in {microbatches // pp} rounds of the same size, which {microbatches} do not make"
    return ""


def check(name: str, pp: int, microbatches: int) -> None:
    """Refuse a number of microbatches that the schedule does not run.

    Raises:
        PlanError: names the nearest number that it runs, and the schedules that run this one.
    """
    if microbatches < 1:
        raise PlanError(f"microbatches={microbatches} is not positive", fix="give at least one microbatch")
    if reason := why_not(name, pp, microbatches):
        raise PlanError(
            f"schedule={name!r} over pp={pp} ranks {reason}",
            fix=f"give microbatches={nearest(name, pp, microbatches)}, or take a schedule that can",
            choices=able(pp, microbatches),
        )


def default(pp: int, microbatches: int) -> str:
    """The schedule where none is asked for: 1F1B where the microbatches suffice, else GPipe."""
    return "1f1b" if takes("1f1b", pp, microbatches) else "gpipe"


def nearest(name: str, pp: int, microbatches: int) -> int:
    """The valid count nearest to the wanted one; of two equally near ones the larger."""
    near = sorted(range(1, 2 * microbatches + pp + 1), key=lambda m: (abs(m - microbatches), -m))
    return next(m for m in near if takes(name, pp, m))


def able(pp: int, microbatches: int) -> Iterable[str]:
    """The schedules that run this number of microbatches."""
    return tuple(name for name in NAMES if takes(name, pp, microbatches))
