"""What a run of the topology table would measure, and about how long that takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tools.bench.topology_points import Case, Sweep

START = 25
"""Seconds that a process takes before its steps, of what is not hidden behind the one before it. A guess."""
BATCHES = 8
"""Batches that a sweep is taken to try: 32 to 2048, and 1.5 times the last one."""


def plan(chosen: Sequence[Case | Sweep], left: Sequence[Case | Sweep], asked: argparse.Namespace) -> str:
    """A line a row, and the sum of what would run. `left`: those without a row, in the order of `chosen`."""
    lines, total = [], 0.0
    for item in chosen:
        enough, seconds = item.gpus <= asked.gpus, about(item, asked)
        state = "kept" if item not in left else "run" if enough else f"needs {item.gpus} GPUs"
        total += seconds if state == "run" else 0.0
        time = f"{seconds / 60:6.1f} min" if item in left else ""
        lines.append(f"{item.name:48} {item.gpus} GPU{'s' if item.gpus > 1 else ' '}  {state:13} {time}".rstrip())
    running = sum(item.gpus <= asked.gpus for item in left)
    return "\n".join([*lines, f"{running} of {len(chosen)} would run on {asked.gpus} GPUs, about {total / 60:.0f} min"])


def about(item: Case | Sweep, asked: argparse.Namespace) -> float:
    """Seconds of all repeats of all sides, none above the time limit."""
    cases = [item] if isinstance(item, Case) else [item.case(item.first * 2**i) for i in range(BATCHES)]
    steps = 5 if asked.quick else 60
    each = [min(START + steps * case.seconds_a_step, asked.time_limit) * len(case.sides) for case in cases]
    return asked.repeats * sum(each)
