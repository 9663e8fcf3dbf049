"""What several GPUs give over one at the same batch on each: the share of a linear gain, from the rows of `scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.topology_points import EACH, SCALED
from tools.bench.topology_rows import value
from tools.bench.vision_models import NAMES
from tools.bench.vision_rows import RATE

SHARE = "share of linear scaling"
LEAST = 0.93
"""Asked of ours for both kinds of data parallelism."""


def with_scaling(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All rows, those of scaling made anew."""
    kept = [row for row in rows if row["metric"] != SHARE]
    rates = {row["point"]: row for row in kept if row["metric"] == RATE}
    made = []
    for model in NAMES:
        one = rates.get(f"scaling {model} 1GPU G={EACH}")
        for topology, gpus in SCALED.items():
            many = rates.get(f"scaling {model} {topology} G={EACH * gpus}")
            if gpus > 1 and one is not None and many is not None and one["ours"] and many["ours"]:
                made.append(_share(one, many, gpus))
    return kept + made


def _share(one: Mapping[str, Any], many: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    ours, peer = _gain(one, many, "ours", gpus), _gain(one, many, "eager", gpus)
    assert ours is not None  # the caller looked
    row = {
        **many,
        "metric": SHARE,
        "unit": "1",
        "ours": f"{ours:.3f}",
        **dict.fromkeys(("peer", "ratio", "spread"), ""),
    }
    row["note"] = ""
    if peer is not None:
        row |= {"peer": f"{peer:.3f}", "ratio": f"{ours / peer:.3g}"}
    return row | ({"status": "ok"} if ours >= LEAST else {"status": "failed", "note": f"less than {LEAST}"})


def _gain(one: Mapping[str, Any], many: Mapping[str, Any], side: str, gpus: int) -> float | None:
    before, after = value(one, side), value(many, side)
    return after / before / gpus if before and after else None
