"""One rank of the comparison of predicted with measured step times; see tensor_parallel.py, which starts two of them.

For each network and batch the profile is measured first: rates, the link over the process group of these ranks, and
the kernels of the network. With it a training step of each of five plans is predicted: no layer shared, the fastest
(`time`), every layer shared (`max`), every second of these whole (`half`), and the one that sends least (`bytes`). Then
the plans run in turn until each one's two best rounds agree within 2 %; the best round counts, on the slowest rank.
Plans that come out alike (as many collectives, predicted within half a percent) are one; points with fewer than three
do not count.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/bench")]

from tensor_parallel_nets import NETS, Net  # noqa: E402

from snnpart import parallelize  # noqa: E402
from snnpart.api import ParallelProgram  # noqa: E402
from snnpart.costs import Link, MachineProfile, measure_profile  # noqa: E402
from snnpart.runtime.collectives import Axis  # noqa: E402
from snnpart.runtime.links import measure_link  # noqa: E402

BYTES = MachineProfile(
    name="bytes",
    flops={"float32": 1e30, "bfloat16": 1e30},
    copy=1e30,
    launch_us=1e-9,
    links={axis: Link(1e6, 0.0) for axis in ("tp", "pp", "dp")},
    source="a machine on which only what is sent takes time: one byte a microsecond",
)
ROUNDS, MOST, WARM = 5, 12, 1
ALIKE, SETTLED = 0.005, 0.02
PRODUCTS = ("column", "row", "scatter")
"""Rules of convolutions and linears whose channels are dealt out."""


def main(device: str, target: str, names: Sequence[str] = ()) -> None:
    join(device)
    machine = measured_machine(device)
    found = [point(name, NETS[name], batch, machine, device) for name in names or NETS for batch in NETS[name].batches]
    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    dist.destroy_process_group()


def join(device: str) -> torch.device:
    """The process group of the ranks, and the device of this one. NCCL wants a GPU for each rank: gloo without, where
    only the short form comes to."""
    own = device != "cuda" or torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if own and device == "cuda" else "gloo")
    torch.set_num_threads(1)
    if device != "cuda":
        return torch.device(device)
    where = torch.device(device, dist.get_rank() if own else 0)
    torch.cuda.set_device(where)
    return where


def measured_machine(device: str) -> MachineProfile:
    """Rates as rank 0 measures them, and the link between the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    link = measure_link(Axis(dist.group.WORLD, rank, tuple(range(size))), device)
    profile: MachineProfile = of_first(measure_profile(device))
    return replace(profile, links=dict.fromkeys(("tp", "pp", "dp"), link))


def of_first(thing: Any) -> Any:
    box = [thing]
    dist.broadcast_object_list(box, 0)
    return box[0]


def point(name: str, net: Net, batch: int, machine: MachineProfile, device: str) -> dict[str, Any]:
    """The plans of one network at one batch, with predicted and measured microseconds."""
    torch.manual_seed(0)
    model, options = net.make().to(device).train(), net.options(batch)
    options["example_inputs"] = options["example_inputs"].to(device)
    profile = of_first(parallelize(model, **options, profile=machine).measured_profile())
    least = parallelize(model, tp=2, **options, profile=BYTES).plan
    products = [path for path, rule in least.shards.items() if rule in PRODUCTS]
    asked: Mapping[str, Mapping[str, Any]] = {
        "whole": {"shard": {"*": "replicate"}},
        "time": {"shard": "time"},
        "max": {"shard": "max"},
        "half": {"shard": dict.fromkeys(products[1::2], "replicate")},
        "bytes": {"plan": least},
    }
    plans: dict[str, ParallelProgram] = {}
    for label, how in asked.items():
        made = parallelize(model, tp=2, **options, profile=profile, **how)
        same = next((other for other, program in plans.items() if _alike(program, made)), None)
        if same is None:
            plans[label] = made
        else:
            plans = {f"{label_} = {label}" if label_ == same else label_: p for label_, p in plans.items()}
    measured = run_in_turn(plans, options["example_inputs"], batch)
    return {
        "point": f"{name}, tp=2, batch {batch}, training",
        "repeats": len(measured[0]),
        "plans": {
            label: {"predicted": _predicted(program), "measured": min(times), "spread": _spread(times)}
            for (label, program), times in zip(plans.items(), measured, strict=True)
        },
    }


def _alike(one: ParallelProgram, other: ParallelProgram) -> bool:
    """The same placement but for what takes no time: a head of ten classes that is whole in one of them."""
    collectives = [len(program.report().collectives) for program in (one, other)]
    return collectives[0] == collectives[1] and abs(_predicted(one) / _predicted(other) - 1) < ALIKE


def _predicted(program: ParallelProgram) -> float:
    return max(program.compiled.stage(0, rank).predicted_us for rank in range(2))


def _spread(times: list[float]) -> float:
    return (sorted(times)[len(times) // 2] - min(times)) / min(times)


def run_in_turn(plans: Mapping[str, ParallelProgram], x: Tensor, batch: int) -> list[list[float]]:
    """Microseconds of training steps on the slowest rank, without an optimizer, for each plan."""
    running = [program.launch(execution="eager", verify=False) for program in plans.values()]
    targets = torch.zeros(batch, device=x.device)
    times: list[list[float]] = [[] for _ in running]
    for turn in range(WARM + MOST):
        slowest = torch.tensor([_once(program, x, targets) for program in running], device=x.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if turn >= WARM:
            for found, once in zip(times, slowest.tolist(), strict=True):
                found.append(once)
        if len(times[0]) >= ROUNDS and all(_settled(found) for found in times):
            break
    for program in running:
        program.close()
    return times


def _settled(times: list[float]) -> bool:
    """Whether the best round is no accident: another one came near it."""
    best, second, *_ = sorted(times)
    return second <= (1 + SETTLED) * best


def _once(program: Any, x: Tensor, targets: Tensor) -> float:
    dist.all_reduce(torch.zeros(1, device=x.device))
    _synchronise(x)
    started = time.perf_counter()
    program.train_step(x, targets, squares)
    _synchronise(x)
    return 1e6 * (time.perf_counter() - started)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    *chosen, where, result = sys.argv[1:]
    main(where, result, chosen)
