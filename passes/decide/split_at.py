"""`split_at=`: the modules that begin the stages, as first places in the order of parts."""

from __future__ import annotations

from collections.abc import Sequence

from snnpart.errors import PlanError
from snnpart.passes.decide.parts import Part


def cuts_at(paths: Sequence[str], order: Sequence[Part], stages: int) -> list[int]:
    """First places (in `order`) of the stages that begin with these module paths.

    Raises:
        PlanError: a path is not there, cannot be cut from what stands before it, or does not come after the one before;
            or they make another number of stages.
    """
    if len(paths) != stages - 1:
        raise PlanError(
            f"split_at names {len(paths)} modules, which makes {len(paths) + 1} stages instead of {stages}",
            fix=f"name the {stages - 1} modules that begin the stages 1 to {stages - 1}"
            if stages > 1
            else "leave it out",
        )
    cuts: list[int] = []
    for path in paths:
        place = _first_place(path, order)
        _check_cut(path, order, place, cuts[-1] if cuts else 0)
        cuts.append(place)
    return cuts


def _is_below(key: str, path: str) -> bool:
    return key == path or key.startswith(f"{path}.")


def _first_place(path: str, order: Sequence[Part]) -> int:
    """Where the first part stands that holds something of the module."""
    found = next((i for i, part in enumerate(order) if any(_is_below(key, path) for key in part.keys)), None)
    if found is None:
        owners = list(dict.fromkeys(key.split(".")[0] for part in order for key in part.keys))
        raise PlanError(
            "split_at names it, but no tensor or neuron layer that the network uses lies there",
            where=f"'{path}'",
            fix="name the module where the stage begins",
            choices=owners[:20],
        )
    return found


def _check_cut(path: str, order: Sequence[Part], place: int, before: int) -> None:
    """Refuse a cut in the midst of a part, at the start, or not after the cut before."""
    joined = [key for key in order[place].keys if not _is_below(key, path)]
    if joined:
        raise PlanError(
            f"no stage can begin there: it cannot be cut from '{joined[0]}'",
            where=f"'{path}'",
            fix="they share a tensor or a neuron layer, or lie on one loop over time; begin the stage elsewhere",
        )
    if place <= before:
        what = (
            "it is where the network begins" if place == 0 else "it does not come after the start of the stage before"
        )
        raise PlanError(f"no stage can begin there: {what}", where=f"'{path}'", fix="name the modules as they run")
