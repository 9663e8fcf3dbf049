"""Rows of the topology table: what a case's measurements say, how failures are kept, and the CSV.

A row's `note` holds `side: reason` for each side that gave no number, parted by "; ". That a batch does not fit in
memory is a result of a sweep; with any other failure, or where the peer is faster, a row's status is failed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench import rows as results
from tools.bench.topology_points import PER_SECOND, Case
from tools.bench.vision_rows import MEMORY

NAME = "topology_table"
NO_MEMORY = "out of memory"
SLOWER = "slower than the peer"
Results = Mapping[str, Sequence[Mapping[str, Any]] | str]


def blank(case: Case, mode: str) -> dict[str, Any]:
    """A row without numbers."""
    here = {"machine": results.gpus(), "versions": results.versions("spikingjelly")}
    unknown = {"peer_name": f"SpikingJelly {mode}", "repeats": "", "status": ""}
    return results.row(NAME, case.name, case.rate, PER_SECOND[case.rate], **unknown, **here)


def rows_of(case: Case, found: Results) -> list[dict[str, Any]]:
    """Throughput and memory against each mode of the peer.

    Args:
        found: by side, its results, or "side: reason"; a side that was not asked is not in it.
    """
    found = {**{side: f"{side}: {why}" for side, why in case.missing.items()}, **found}
    rows = [made(case, mode, found) for mode in case.modes for made in (_rates, _memory)]
    return [row for row in rows if row["peer"] or row["ours"] or row["note"]]


def _rates(case: Case, mode: str, found: Results) -> dict[str, Any]:
    ours, peer = (_numbers(found.get(side, ()), case.rate) for side in ("ours", mode))
    failed = {side: shortened(found[side]) for side in (mode, "ours") if isinstance(found.get(side), str)}
    swept = case.section.endswith("sweep")
    ended = all(why == NO_MEMORY for why in failed.values()) if swept else not failed
    row = {**blank(case, mode), **_values(peer, ours, 1)}
    slower = bool(peer and ours and statistics.median(ours) < statistics.median(peer))
    notes = [f"{side}: {why}" for side, why in failed.items()] + [SLOWER] * slower
    status = "ok" if ended and not slower else "failed" if case.sides else "not-run"
    return row | {"status": status, "note": "; ".join(notes)}


def _memory(case: Case, mode: str, found: Results) -> dict[str, Any]:
    ours, peer = ([x / 2**30 for x in _numbers(found.get(side, ()), MEMORY)] for side in ("ours", mode))
    row = {**blank(case, mode), "metric": "peak memory reserved", "unit": "GiB", "status": "ok"}
    return row | _values(peer, ours, -1)


def _numbers(results: Sequence[Mapping[str, Any]] | str, key: str) -> list[float]:
    return [] if isinstance(results, str) else [float(result[key]) for result in results]


def _values(peer: Sequence[float], ours: Sequence[float], power: int) -> dict[str, Any]:
    """Medians; `power` of ours / peer says how many times better ours is."""
    theirs, middle = (statistics.median(side) if side else None for side in (peer, ours))
    row: dict[str, Any] = {"repeats": len(ours or peer)}
    row |= {"peer": "" if theirs is None else f"{theirs:.5g}", "ours": "" if middle is None else f"{middle:.5g}"}
    if middle is not None:
        row["spread"] = f"{(max(ours) - min(ours)) / middle:.3f}"
    if middle is not None and theirs is not None:
        row["ratio"] = f"{(middle / theirs) ** power:.3g}"
    return row


def shortened(reason: Any) -> str:
    """Why a side has no number, without its name; one phrase for all ways to run out of memory."""
    text = str(reason).partition(": ")[2].replace("; ", ", ")
    return NO_MEMORY if NO_MEMORY in text or "ALLOC_FAILED" in text else text


def value(row: Mapping[str, Any], side: str) -> float | None:
    """The number of "ours" or of the mode of the peer that the row is about."""
    if side == "ours":
        return float(row["ours"]) if row["ours"] else None
    return float(row["peer"]) if row["peer"] and row["peer_name"] == f"SpikingJelly {side}" else None


def reasons(row: Mapping[str, Any]) -> dict[str, str]:
    """Why sides of the row have no number."""
    parts = (part.partition(": ") for part in row["note"].split("; "))
    return {side: why for side, _, why in parts if why}


def not_run(case: Case, name: str) -> list[dict[str, Any]]:
    """Rows that stand for what needs more GPUs than were there."""
    command = f'python tools/bench/{NAME}.py --points "{name}"'
    note = f"needs {case.gpus} GPU{'s' * (case.gpus > 1)}; {command}"
    empty = {"point": name, "status": "not-run", "note": note, "machine": "", "versions": ""}
    return [{**blank(case, mode), **empty} for mode in case.modes]


def write(path: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """In the order of `names`, a sweep's batches where its name stands, smaller ones first."""
    order = {name.removesuffix(" largest"): place for place, name in enumerate(names)}

    def key(row: Mapping[str, Any]) -> tuple[int, int]:
        point = row["point"]
        if point in order:
            return order[point], 0
        prefix, _, batch = point.rpartition(" ")
        return order.get(prefix, len(order)), int(batch.removeprefix("G=")) if batch.startswith("G=") else 10**9

    results.write(path, [dict(row) for row in sorted(rows, key=key)])
