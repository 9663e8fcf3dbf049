"""How long a training run takes to its first step on a GPU: with empty caches, and again with what they then hold.

    python tools/bench/start_up.py                 # SEW-ResNet34, batch 32; about 3 minutes on one H200
    python tools/bench/start_up.py --repeats 1
    python tools/bench/start_up.py --device cpu --size 32    # prints only: no file without --output

Each measurement is a process of its own that runs `vision_ours.py`: SpikingJelly's network at 128x128, T = 4, 1000
classes, bfloat16, AdamW. Counted are the seconds from the call of `parallelize` to the end of the first step, on the
device; beside them the seconds of the whole process to there, with the imports of torch and SpikingJelly. The caches of
Triton, torch, the CUDA driver and snnpart lie in a folder that is empty before the first process of each pair. Rows are
written after each pair, so that a run cut off leaves what it measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.rows import RESULTS, Row, gpus, read, replaced, row, versions, write  # noqa: E402
from tools.bench.vision_models import NAMES  # noqa: E402

DEVICE, SIZE = "cuda", 128
"""What the rows of the results are measured with."""
LIMITS = {"empty caches": 40.0, "caches on disk": 10.0}
"""Seconds to the end of the first step."""
PARTS = ("compile_s", "launch_s", "first_step_s")
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "torch", "CUDA_CACHE_PATH": "cuda"}


def environment(folder: Path) -> dict[str, str]:
    """This process's, with all caches in the folder."""
    places = {name: str(folder / place) for name, place in CACHES.items()}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **places, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": paths}


def started(command: Sequence[str], folder: Path) -> dict[str, float]:
    """Seconds to the first step of one process, and what they are made of."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=300, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), "")
    if not line:
        raise SystemExit(f"no result:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    parts = {name: float(found[name]) for name in PARTS}
    return {**parts, "first": sum(parts.values()), "process": float(found["process_s"])}


def pair(command: Sequence[str]) -> dict[str, dict[str, float]]:
    """A start with empty caches, and one after it."""
    with tempfile.TemporaryDirectory() as folder:
        return {state: started(command, Path(folder)) for state in LIMITS}


def rows_of(name: str, state: str, runs: Sequence[Mapping[str, float]]) -> list[Row]:
    """The row with the limit, and that of the whole process."""
    rows = []
    for metric, key, limit in (
        ("seconds to the first step", "first", LIMITS[state]),
        ("seconds of the process to there", "process", None),
    ):
        values = [run[key] for run in runs]
        middle = statistics.median(values)
        parts = ", ".join(f"{part.removesuffix('_s')} {statistics.median(r[part] for r in runs):.2f}" for part in PARTS)
        rows.append(
            row(
                "start_up", f"{name} 1GPU G=32, {state}", metric, "s", ours=f"{middle:.4g}", repeats=len(values),
                spread=f"{(max(values) - min(values)) / middle:.2f}", machine=gpus(), versions=versions("spikingjelly"),
                status="ok" if limit is None or middle <= limit else "failed",
                note=f"limit {limit:g}; {parts}" if limit is not None else "",
            )
        )  # fmt: skip
    return rows


def target_of(asked: argparse.Namespace) -> Path | None:
    """The file for the rows: the one asked for, else that of the results for what these are measured with, else none.
    Rows of other devices and sizes would have the same names."""
    usual = asked.device == DEVICE and asked.size == SIZE
    given: Path | None = asked.output
    return given or (RESULTS / "start_up.csv" if usual else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default=NAMES[0])
    parser.add_argument("--repeats", type=int, default=3, help="pairs of starts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--output", type=Path, help="default: the results, or no file with another device or size")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    steps = ("--batch", "32", "--warm", "2", "--steps", "1", "--device", asked.device, "--size", str(asked.size))
    command = [sys.executable, str(ROOT / "tools/bench/vision_ours.py"), "--model", asked.model, *steps]
    target, pairs, rows = target_of(asked), [], []
    for _ in range(asked.repeats):
        pairs.append(pair(command))
        rows = [one for state in LIMITS for one in rows_of(asked.model, state, [found[state] for found in pairs])]
        if target is not None:
            write(target, replaced(read(target), rows, lambda one: (one["point"], one["metric"])))
    for one in rows:
        print("{point}: {metric} {ours} {unit}, spread {spread} {status} {note}".format(**one), flush=True)


if __name__ == "__main__":
    main()
