"""What tensor parallelism shares: how much of each zoo network is dealt out by `shard="max"` at tp=2.

    python tools/bench/sharded.py                 every network of tests/zoo.py and tools/zoo
    python tools/bench/sharded.py --only unet     one of them, and which layers stay whole
    python tools/bench/sharded.py --quick         three networks; writes no file

Two shares, by the plan: of the flops of all products with a weight (convolutions, linears, matrices inside cells and
loops), and of the elements of all parameters that forward uses. Asked for are 95 % and 90 %. The networks in
`EXCEPTIONS` have less, for the reason that stands there. Writes docs/results/sharded.csv.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import facts  # noqa: E402
from snnpart.compilation import Options, trace_network  # noqa: E402
from snnpart.costs import CPU  # noqa: E402
from snnpart.errors import SnnpartError  # noqa: E402
from snnpart.facts import Placement, Sharded  # noqa: E402
from snnpart.graph import SpikeGraph  # noqa: E402
from snnpart.ops_time import Loop  # noqa: E402
from snnpart.pass_manager import PassManager  # noqa: E402
from snnpart.passes import ANALYZE, REWRITE  # noqa: E402
from snnpart.passes.analyze import kinds  # noqa: E402
from snnpart.passes.analyze.cost import product_flops  # noqa: E402
from snnpart.passes.decide.constraints import to_share  # noqa: E402
from snnpart.passes.decide.lanes import REPLICATE, path_of  # noqa: E402
from snnpart.passes.decide.placement import DecidePlacement  # noqa: E402
from snnpart.passes.rewrite.shard_channels import local_tensors  # noqa: E402
from snnpart.passes.rewrite.unfold_feedback import UnfoldFeedback  # noqa: E402
from tests.distributed.jobs import layout  # noqa: E402
from tests.zoo import ZOO, Model  # noqa: E402
from tools.bench.rows import Row, row, write  # noqa: E402
from tools.zoo.catalogue import ZOO as PUBLIC  # noqa: E402
from tools.zoo.catalogue import Entry  # noqa: E402

LEAST_FLOPS, LEAST_PARAMETERS = 0.95, 0.90
EXCEPTIONS: Mapping[str, str] = {}
"""Networks that have less, with the reason; there is none now."""
QUICK = ("small_sew-m", "unet", "tied")


@dataclass(frozen=True)
class Share:
    """What is dealt out of a network, and the layers and parameters that stay whole with their part of the total."""

    flops: float
    parameters: float
    whole: Mapping[str, float]

    @property
    def enough(self) -> bool:
        return self.flops >= LEAST_FLOPS and self.parameters >= LEAST_PARAMETERS


def models() -> dict[str, Model]:
    """Both zoos; a name that both have is the one of the public models."""
    return {**ZOO, **PUBLIC}


def placed(model: Model) -> SpikeGraph:
    """The network with the placement of `shard="max"`."""
    torch.manual_seed(0)
    module = model.factory().to(model.dtype).train(model.training if isinstance(model, Entry) else True)
    inputs = model.inputs()
    options = Options(tp=2, verify="off", **_dims(model))
    graph = trace_network(module, inputs[0] if len(inputs) == 1 else inputs, options, module.training)
    PassManager((*REWRITE, UnfoldFeedback(to_share("max", None)), *ANALYZE)).run(graph)
    DecidePlacement(2, CPU).run(graph)
    return graph


def _dims(model: Model) -> dict[str, Any]:
    if isinstance(model, Entry):
        return model.options
    if model.time_dim is None:
        return {"in_dims": model.in_dims, "time_steps": model.steps}
    return {"input_layout": layout(model), "time_steps": model.steps}


def share(graph: SpikeGraph) -> Share:
    """How much of a placed network is dealt out."""
    products = [(node, flops) for node in graph.graph.nodes if (flops := product_flops(node, graph))]
    lies = local_tensors(graph)
    tensors = [info for info in graph.tensors.values() if info.kind == "parameter" and info.used]
    cut = {name for name, local in lies.items() if isinstance(local.spread, Sharded)}
    all_flops = sum(flops for _, flops in products) or 1.0
    elements = sum(info.tensor.numel() for info in tensors) or 1
    whole: dict[str, float] = {}
    for node, flops in products:
        if facts.need(node, Placement).rule == REPLICATE:
            whole[f"{_place(node)} (flops)"] = whole.get(f"{_place(node)} (flops)", 0.0) + flops / all_flops
    lost = sum(whole.values())
    kept = {info.name: info.tensor.numel() / elements for info in tensors if info.name not in cut}
    return Share(1 - lost, 1 - sum(kept.values()), {**whole, **kept})


def _place(node: fx.Node) -> str:
    return "a time loop" if isinstance(node.target, Loop) else path_of(node) or kinds.name_of(node)


def rows(name: str, found: Share) -> Iterator[Row]:
    """The two rows of a network."""
    for metric, value, least in (
        ("flops of products with a weight that are shared", found.flops, LEAST_FLOPS),
        ("elements of used parameters that are shared", found.parameters, LEAST_PARAMETERS),
    ):
        good = value >= least
        note = "" if good else f"less than {least:.0%}: {EXCEPTIONS.get(name, 'unexpected')}"
        yield _row(name, metric, f"{100 * value:.2f}", "ok" if good else "failed", note)


def refused(name: str, error: SnnpartError) -> Row:
    """The row of a network that is not compiled at all."""
    return _row(name, "flops of products with a weight that are shared", "", "failed", f"refused: {error.what}")


def _row(name: str, metric: str, ours: str, status: str, note: str) -> Row:
    """Flops and elements are counted: they are the same on any machine."""
    said = {"machine": platform.machine(), "versions": f"torch {torch.__version__}", "spread": 0}
    return row("sharded", f"{name}, tp=2, shard=max", metric, "%", ours=ours, status=status, note=note, **said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small networks; writes no file")
    parser.add_argument("--only", nargs="*", help="these networks; lists what stays whole and writes no file")
    parser.add_argument("--output", type=Path, help="the CSV to write")
    options = parser.parse_args()
    every = models()
    names = options.only or (QUICK if options.quick else tuple(every))
    target = options.output or (None if options.quick or options.only else ROOT / "docs/results/sharded.csv")
    table = []
    for name in names:
        try:
            found = share(placed(every[name]))
        except SnnpartError as error:
            table.append(refused(name, error))
            print(f"{name}: refused: {error}")
            continue
        table += rows(name, found)
        print(f"{name}: {found.flops:.1%} of the flops, {found.parameters:.1%} of the parameters", flush=True)
        for place, part in found.whole.items() if options.only or not found.enough else ():
            print(f"    whole: {place}, {part:.1%}")
    if target is not None:
        write(target, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
