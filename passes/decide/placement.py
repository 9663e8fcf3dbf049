"""Channel sharding."""
from __future__ import annotations

from snnpart.graph import SpikeGraph
from snnpart.plan import Plan


def apply_shards(graph: SpikeGraph, plan: Plan) -> tuple[str, ...]:
    return ()
