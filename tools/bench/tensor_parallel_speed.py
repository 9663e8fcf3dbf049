"""One rank of the race between the peer's tensor parallelism and ours; tensor_parallel.py starts two of them.

Both run the same network on the same two ranks, in turn, a step of one after a step of the other: evaluation, and
training (forward, cross-entropy, backward, no optimizer). The peer is SpikingJelly's own builder with a process group
of the two ranks. Ours shares every layer (`shard="max"`), and, beside it, what the cost model finds fastest (`time`),
which may leave layers whole; the profile is measured on these ranks and this link.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/bench")]

from tensor_parallel_peer import TIMED, Point  # noqa: E402
from tensor_parallel_predict import join, measured_machine, of_first  # noqa: E402

from snnpart import parallelize  # noqa: E402
from snnpart.costs import MachineProfile  # noqa: E402

ROUNDS, WARM = 9, 2
CUDA_ROUNDS, CUDA_WARM = 30, 15


@dataclass(frozen=True)
class Race:
    """What both sides get: the network, its batch, where and in which type it runs."""

    point: Point
    device: torch.device
    dtype: torch.dtype
    training: bool

    @property
    def images(self) -> Tensor:
        point = self.point
        return torch.rand(4, point.batch, 3, point.size, point.size).to(self.device, self.dtype)

    @property
    def labels(self) -> Tensor:
        return torch.zeros(self.point.batch, dtype=torch.long, device=self.device)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the scores' mean over T."""
    return F.cross_entropy(outputs.float().mean(0) if outputs.dim() == 3 else outputs.float(), labels)


def peer_step(race: Race) -> Callable[[], None]:
    """A step of SpikingJelly's tensor-parallel model."""
    from spikingjelly.activation_based import functional

    model = race.point.peer(dist.group.WORLD, race.point.batch).to(race.device, race.dtype).train(race.training)
    images, labels = race.images, race.labels

    def step() -> None:
        with torch.set_grad_enabled(race.training):
            outputs = model(images)
            if race.training:
                loss(outputs, labels).backward()
                model.zero_grad(set_to_none=True)
        functional.reset_net(model)

    return step


def our_steps(race: Race, machine: MachineProfile) -> dict[str, tuple[Callable[[], None], int]]:
    """Steps of our programs of the same network, with the number of their collectives."""
    torch.manual_seed(0)
    model: nn.Module = race.point.canonical().to(race.device, race.dtype).train(race.training)
    model.requires_grad_(race.training)
    images, labels = race.images, race.labels
    options: dict[str, Any] = {"example_inputs": images, "input_layout": "TNCHW", "verify": "off"}
    profile = of_first(parallelize(model, **options, profile=machine).measured_profile())
    found: dict[str, tuple[Callable[[], None], int]] = {}
    for label in ("max", "time"):
        program = parallelize(model, tp=dist.get_world_size(), shard=label, **options, profile=profile)  # type: ignore[arg-type]
        running: Any = program.launch(verify=False, check_inputs=False)
        step = _training(running, images, labels) if race.training else _evaluating(running, images)
        found[label] = (step, len(program.report().collectives))
    return found


def _training(running: Any, images: Tensor, labels: Tensor) -> Callable[[], None]:
    def step() -> None:
        running.train_step(images, labels, loss)
        running.zero_grad()

    return step


def _evaluating(running: Any, images: Tensor) -> Callable[[], None]:
    return lambda: running.eval_step(images)


def run(race: Race, machine: MachineProfile) -> dict[str, Any]:
    """Seconds a step of each side, the median of the rounds on the slowest rank, and how far they spread."""
    ours = our_steps(race, machine)
    steps = {"peer": peer_step(race), **{label: step for label, (step, _) in ours.items()}}
    warm, rounds = (CUDA_WARM, CUDA_ROUNDS) if race.device.type == "cuda" else (WARM, ROUNDS)
    times = torch.tensor([[_once(race, step) for step in steps.values()] for _ in range(warm + rounds)])[warm:]
    times = times.to(race.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    ordered = times.sort(0).values.cpu()
    sides = {
        label: {
            "seconds": float(ordered[rounds // 2, side]),
            "spread": float((ordered[-1, side] - ordered[0, side]) / ordered[rounds // 2, side]),
            "collectives": ours[label][1] if label in ours else None,
        }
        for side, label in enumerate(steps)
    }
    point = {"point": race.point.label, "training": race.training, "batch": race.point.batch}
    return {**point, "repeats": rounds, "sides": sides}


def _once(race: Race, step: Callable[[], None]) -> float:
    dist.all_reduce(torch.zeros(1, device=race.device))
    _synchronise(race)
    started = time.perf_counter()
    step()
    _synchronise(race)
    return time.perf_counter() - started


def _synchronise(race: Race) -> None:
    if race.device.type == "cuda":
        torch.cuda.synchronize()


def main(device: str, *given: str) -> None:
    """`given`: where the results go, and before it the name of another list of `TIMED` than the device's."""
    *chosen, target = given
    where = join(device)
    machine = measured_machine(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    races = [
        Race(point, where, dtype, training) for point in TIMED[(chosen or [device])[0]] for training in (False, True)
    ]
    found = [run(race, machine) for race in races]
    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
