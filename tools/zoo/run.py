"""Runs the zoo: every network on every topology against one process, and the table of what came out.

    python tools/zoo/run.py                      all networks; writes docs/results/zoo.csv and zoo.md
    python tools/zoo/run.py --only B05 --only B09   these only; writes nothing unless --output says where
    python tools/zoo/run.py --no-processes       without the process groups

Each network is compiled with verify="full" and run on simulated ranks (tp 2; pp 2; tp 2 x pp 2; each with 1 and 2
microbatches), and on gloo processes with dp 2, and a covering subset with tp 2, pp 2 and tp 2 x pp 2, under 1F1B,
zero-bubble and interleaved schedules. Output, loss, every gradient and every buffer must equal one process: to 1e-9 in
float64, 1e-5 where a framework insists on float32.
Everything else must be a refusal that names module and trait.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.distributed.pool import Pool  # noqa: E402
from tools.bench import rows as results  # noqa: E402
from tools.bench.rows import Row, write  # noqa: E402
from tools.zoo import jobs  # noqa: E402
from tools.zoo.catalogue import ZOO  # noqa: E402
from tools.zoo.check import TOPOLOGIES, Outcome, check  # noqa: E402

OUTPUT = ROOT / "docs/results/zoo.csv"
COVERING = ("B01-ADD", "B05", "B08", "B09-vgg", "B10-dense", "B12-snn", "B15-hidden", "B16-regression", "B17-cifar")
"""Networks that run on process groups with tp and pp too."""
WORDS = {"microbatches": "mb", "schedule": ""}
PROCESSES: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"pp": 2, "microbatches": 2},
    {"tp": 2, "pp": 2, "microbatches": 2},
    {"pp": 2, "microbatches": 2, "schedule": "zbv"},
    {"tp": 2, "pp": 2, "microbatches": 2, "schedule": "interleaved-1f1b"},
)


def points(names: list[str], pool: Pool | None) -> Iterator[tuple[str, str, Outcome]]:
    """(network, topology, outcome)."""
    for name in names:
        for tp, pp, microbatches in TOPOLOGIES:
            yield name, f"simulated tp{tp} pp{pp} mb{microbatches}", check(ZOO[name], tp, pp, microbatches)
        if pool is None:
            continue
        yield name, "processes dp2", jobs.check(pool, name, dp=2)
        for topology in PROCESSES if name in COVERING else ():
            label = " ".join(f"{WORDS.get(key, key)}{value}" for key, value in topology.items())
            yield name, f"processes {label}", jobs.check(pool, name, **topology)


def row(name: str, topology: str, outcome: Outcome) -> Row:
    """A line of the table: the largest difference from one process, or the refusal."""
    note = ZOO[name].traits if outcome.verdict == "equal" else outcome.note
    cut = "" if outcome.sharded is None else f"; {100 * outcome.sharded:.0f}% of the parameters sharded"
    return results.row(
        "zoo",
        f"{name} {topology}",
        "difference" if outcome.verdict in ("equal", "differs") else outcome.verdict,
        "relative",
        peer_name="one process",
        ours="" if outcome.difference is None else f"{outcome.difference:.2g}",
        status="ok" if outcome.verdict in ("equal", "refused") else "failed",
        note=note + cut,
    )


def page(rows: list[Row]) -> str:
    """The page beside the table: one line a network."""
    lines = []
    for name in dict.fromkeys(row["point"].split()[0] for row in rows):
        mine = [row for row in rows if row["point"].split()[0] == name]
        counts = {
            metric: sum(row["metric"] == metric and row["status"] == "ok" for row in mine)
            for metric in ("difference", "refused")
        }
        failed = sum(row["status"] == "failed" for row in mine)
        worst = max((float(row["ours"]) for row in mine if row["ours"] and row["status"] == "ok"), default=None)
        shown = "" if worst is None else f"{worst:.1g}"
        lines.append(
            f"| {name} | {ZOO[name].traits} | {counts['difference']} | {counts['refused']} | {failed} | {shown} |"
        )
    refusals = dict.fromkeys(
        f"- `{r['point']}`: {r['note']}" for r in rows if r["metric"] != "difference" or r["status"] == "failed"
    )
    return PAGE.format(lines="\n".join(lines), refusals="\n".join(refusals) or "None.")


PAGE = """# Public models

Networks of `tools/zoo`, written anew and small, each with the traits that make a published spiking network hard to
partition. Every network is compiled with `verify="full"` and compared with one process: output, loss, all gradients,
all buffers, to 1e-9 (1e-5 where a framework insists on float32; the inputs then keep every membrane away from its
threshold). Every neuron layer fires. Topologies: tp 2, pp 2, tp 2 x pp 2, each with 1 and 2 microbatches, on simulated
ranks; dp 2, and for a covering subset tp and pp, on gloo processes.

    python tools/zoo/run.py                # about five minutes on 2 cores
    python tools/zoo/run.py --only B05

The numbers are in [zoo.csv](zoo.csv).

| network | traits | equal | refused by name | failed | largest difference |
| --- | --- | --- | --- | --- | --- |
{lines}

## Refusals and failures

{refusals}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="networks whose names begin so")
    parser.add_argument("--no-processes", action="store_true", help="simulated ranks only")
    parser.add_argument("--output", type=Path, help="where to write the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in ZOO if not given.only or name.startswith(tuple(given.only))]
    pool = None if given.no_processes else Pool()
    rows = []
    try:
        for name, topology, outcome in points(names, pool):
            rows.append(row(name, topology, outcome))
            print(f"{name} {topology}: {outcome.verdict} {outcome.note or outcome.difference}", flush=True)
    finally:
        if pool is not None:
            pool.close()
    path = given.output or (None if given.only or given.no_processes else OUTPUT)
    if path is not None:
        write(path, rows)
        path.with_suffix(".md").write_text(page(rows))
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
