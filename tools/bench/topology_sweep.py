"""The search for the largest batch: doubled until it fails, then 1.5 times the last that went well.

Each side has its own search; where both are due at the same batch they are measured in turn, and where they are not,
the smaller batch comes first. What was tried is read from the rows, so that a search goes on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.topology_points import Case, Sweep
from tools.bench.topology_rows import blank, reasons, value


def following(known: Mapping[int, bool], first: int, limit: int | None = None) -> int | None:
    """The batch to try next; None at the end of the search.

    Args:
        known: whether each batch that was tried went well.
        limit: nothing is tried beyond it.
    """
    batch = first
    while known.get(batch):
        batch *= 2
    if batch in known:  # it failed, so half of it is the last that went well, unless it was the first
        batch = batch * 3 // 4
    if batch < first or batch in known or (limit is not None and batch > limit):
        return None
    return batch


def tried(sweep: Sweep, rows: Sequence[Mapping[str, Any]], side: str) -> dict[int, bool]:
    """Batches of one data-parallel rank, and whether `side` ran them."""
    found = {}
    for row in rows:
        if not row["point"].startswith(f"{sweep.prefix} G=") or row["unit"] == "GiB" or row["status"] == "not-run":
            continue
        each = int(row["point"].rpartition("=")[2]) // sweep.copies
        if value(row, side) is not None:
            found[each] = True
        elif side in reasons(row):
            found[each] = False
    return found


def due(sweep: Sweep, rows: Sequence[Mapping[str, Any]], limit: int | None) -> tuple[Case, list[str]] | None:
    """The next case and the sides that are to run it; None when all have ended."""
    sides = list(sweep.case(sweep.first).sides)
    found = {side: following(tried(sweep, rows, side), sweep.first, limit) for side in sides}
    left = {side: batch for side, batch in found.items() if batch is not None}
    if not left:
        return None
    batch = min(left.values())
    return sweep.case(batch), [side for side, chosen in left.items() if chosen == batch]


def result(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the largest global batch of each side, one a mode of the peer."""
    case = sweep.case(sweep.first)
    best = {side: largest(sweep, rows, side) for side in ("ours", *case.modes)}
    made = []
    for mode in case.modes:
        row = {**blank(case, mode), "point": sweep.name, "metric": "largest batch", "unit": "samples"}
        peer, ours = best[mode], best["ours"]
        row |= {"peer": str(peer or ""), "ours": str(ours or "")}
        row |= {"ratio": f"{ours / peer:.3g}" if peer and ours else ""}
        absent = [side for side in (mode, "ours") if not best[side]]
        why = "; ".join(f"{side}: {case.missing.get(side, 'no batch ran')}" for side in absent)
        status = "ok" if ours and ours >= (peer or 0) else "failed" if case.sides else "not-run"
        made.append({**row, "status": status, "note": why})
    return made


def largest(sweep: Sweep, rows: Sequence[Mapping[str, Any]], side: str) -> int | None:
    """The largest global batch that `side` ran."""
    ran = [batch for batch, well in tried(sweep, rows, side).items() if well]
    return max(ran) * sweep.copies if ran else None
