"""What the ranks do in the tests of FSDP2's units: steps with a log of what each unit does, and hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.errors import SnnpartError
from snnpart.ops_packed import PackedInput
from snnpart.runtime.fsdp2 import Fsdp2
from snnpart.runtime.gradients import local_part
from snnpart.runtime.unit import Unit
from tests.distributed.cases import CASES, Aux, det, fill
from tests.distributed.jobs import dp_share, launch_case
from tests.distributed.jobs_launch import both_answers, first_answer, second_answer
from tests.gpu import jobs_execution as images
from tests.neurons import LIF


def logged(name: str, *, steps: int = 2, evaluates: bool = False, **topology: Any) -> dict[str, Any]:
    """What the units do in the last step: `start`, `gather` (where it was not whole), `free`, `reduce`, with their
    numbers; the most bytes that were whole at a time, and those of all parameters."""
    case, (running, _) = CASES[name], launch_case(name, learn=True, **topology)
    parallel = running._engine.parallel
    assert isinstance(parallel, Fsdp2)
    x, y = case.batches()[0]
    mine = dp_share(x, case.batch_dim, running.ranks), dp_share(y, case.target_dim, running.ranks)
    loss = case.loss_fn(x.shape[case.batch_dim])
    log = _Log(parallel)
    for _ in range(steps):
        log.clear()
        running.eval_step(mine[0]) if evaluates else running.train_step(*mine, loss)
    result = {"events": log.events, "most": log.most, "all": log.all, "units": [unit.number for unit in parallel.units]}
    result["between"] = sum(map(_whole_bytes, parallel.units))
    foot = running.compiled.footprint_of(running.compiled.stage(0, 0), 2)
    result |= {"gathered": foot.gathered, "predicted shards": foot.parameters}
    result["shards"] = max(running.ranks.gather(sum(local_part(p).nbytes for p in running.parameters())))
    result["tensors"] = sum(len(unit.members) for unit in parallel.units)
    running.close()
    return result


def gathers(schedule: str) -> dict[int, int]:
    """How often each unit of a rank is gathered in a step of four microbatches: units of four convolutions."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())])
    x = det(4, 2, 4, 4)
    program = parallelize(
        net.double(), example_inputs=x, verify="off", pp=2, dp="fsdp2", schedule=schedule, microbatches=4,
        fsdp_units=1, fsdp_reshard=True,
    )  # fmt: skip
    running = program.launch()
    parallel = running._engine.parallel
    assert isinstance(parallel, Fsdp2)
    log = _Log(parallel)
    for _ in range(2):
        log.clear()
        running.train_step(x, x, F.mse_loss)
    running.close()
    return {unit.number: log.events.count(("start", unit.number)) for unit in parallel.units}


class _Log:
    """Notes the calls of one launched program's units."""

    def __init__(self, parallel: Fsdp2) -> None:
        self.events: list[tuple[str, int]] = []
        self.most = 0
        self.all = sum(memory.bytes for unit in parallel.units for memory in unit.memories.values())
        for unit in parallel.units:
            for name in ("start", "gather", "free", "reduce"):
                setattr(unit, name, self._noted(parallel, unit, name))

    def _noted(self, parallel: Fsdp2, unit: Unit, name: str) -> Any:
        inner = getattr(unit, name)

        def call() -> None:
            idle = {"start": unit.is_whole or unit.is_coming, "gather": unit.is_whole, "free": not unit.is_whole}
            if not idle.get(name, False):
                self.events.append((name, unit.number))
            inner()
            self.most = max(self.most, sum(map(_whole_bytes, parallel.units)))

        return call

    def clear(self) -> None:
        self.events, self.most = [], 0


def _whole_bytes(unit: Unit) -> int:
    return sum(memory.held for memory in unit.memories.values())


def autocast(dp: str, precision: str, execution: str = "eager", **options: Any) -> dict[str, Any]:
    """Steps of a network of images in half precision, the bytes that a rank sends into the gathers of all units, and
    those that it holds of them."""
    x, _ = images.batch(0)
    program = parallelize(
        images.make_net(),
        example_inputs=x[:8],
        input_layout="NCHW",
        time_steps=images.T,
        verify="off",
        dp=dp,
        **options,
    )
    running = program.launch(
        lambda params: torch.optim.AdamW(params, lr=2e-3), precision=precision, execution=execution, clip_grad_norm=1.0
    )
    losses = []
    for number in range(2):
        x, y = (part.tensor_split(2)[running.ranks.at.dp] for part in images.batch(number))
        losses.append(float(running.train_step(x, y, images.loss_fn)))
    result = {"losses": losses, "gradients": running.gradients(), "state": running.state_dict()}
    parallel = running._engine.parallel
    result["outputs"] = running.eval_step(x)
    graph = program.compiled.stages[0, 0].graph
    result["packed"] = sum(isinstance(node.target, PackedInput) for node in graph.nodes)
    units = parallel.units if isinstance(parallel, Fsdp2) else ()
    result |= {"sent": sum(u.row().numel() for u in units), "held": sum(u.held.numel() for u in units)}
    running.close()
    return result


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(4, 6), LIF(vth=0.1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.n(self.a(x)))
        return out


def hooked(where: str) -> Any:
    """Hooks on what the user was given: `accumulate` counts calls and doubles the gradient, `gradient` is refused."""
    program = parallelize(
        fill(Hooked(), scale=0.9).double(), example_inputs=det(4, 4) * 2, verify="off", dp="fsdp2", microbatches=2
    )
    running = program.launch()
    weight, calls = dict(running.named_parameters())["a.weight"], []

    def double(parameter: Tensor) -> None:
        calls.append(tuple(parameter.shape))
        parameter.grad = parameter.grad * 2  # type: ignore[operator]

    if where == "accumulate":
        weight.register_post_accumulate_grad_hook(double)
    elif where == "gradient":
        weight.register_hook(lambda grad: grad)
    x, y = det(8, 4) * 2, torch.arange(8) % 3
    mine = slice(4 * running.ranks.at.dp, 4 * running.ranks.at.dp + 4)
    try:
        running.train_step(x[mine], y[mine], F.cross_entropy)
        result: Any = calls, running.gradients()
    except SnnpartError as error:
        result = f"{type(error).__name__}: {error}"
    running.close()
    return result


def unreached(units: int, reshard: bool) -> list[Any]:
    """Losses that reach one of two answers, then both, then the other: gradients after each step."""
    program = parallelize(
        fill(Aux()), example_inputs=det(4, 4), verify="off", dp="fsdp2", fsdp_units=units, fsdp_reshard=reshard
    )
    running = program.launch()
    found = []
    for i, loss in enumerate((first_answer, both_answers, second_answer, first_answer)):
        x, y = det(8, 4, k=0.3 + 0.1 * i), torch.arange(8) % 3
        mine = slice(4 * running.ranks.at.dp, 4 * running.ranks.at.dp + 4)
        running.zero_grad()
        running.train_step(x[mine], y[mine], loss)
        found.append(running.gradients())
    running.close()
    return found


def unlike(units: int) -> list[dict[str, Tensor]]:
    """Losses that reach one answer on each rank, both, and the other one on each rank: gradients after each step."""
    program = parallelize(
        fill(Aux()), example_inputs=det(4, 4), verify="off", dp="fsdp2", fsdp_units=units, fsdp_reshard=False
    )
    running, found = program.launch(), []
    at = running.ranks.at.dp
    for i, losses in enumerate(UNLIKE):
        running.zero_grad()
        x, y = det(8, 4, k=0.3 + 0.1 * i), torch.arange(8) % 3
        running.train_step(x[4 * at : 4 * at + 4], y[4 * at : 4 * at + 4], losses[at])
        found.append(running.gradients())
    running.close()
    return found


UNLIKE = ((first_answer, second_answer), (both_answers, both_answers), (second_answer, first_answer))
"""The losses of both ranks in each step."""


def few_samples(reshard: bool) -> list[Any]:
    """Batches of (2, 2), (2, 1) and (1, 1) samples on two ranks with two microbatches: losses or what is raised."""
    program = parallelize(
        fill(Hooked(), scale=0.9), example_inputs=det(2, 4) * 2, verify="off", dp="fsdp2", microbatches=2,
        fsdp_units=2, fsdp_reshard=reshard,
    )  # fmt: skip
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    found: list[Any] = []
    for sizes in ((2, 2), (2, 1), (1, 1)):
        x, y = (
            part.split(sizes)[running.ranks.at.dp] for part in (det(sum(sizes), 4) * 2, torch.arange(sum(sizes)) % 3)
        )
        try:
            found.append(running.train_step(x, y, F.cross_entropy).item())
        except SnnpartError as error:
            found.append(f"{type(error).__name__}: {error}")
    running.close()
    return found


def doubled(**how: Any) -> dict[str, Tensor]:
    """Gradients of a network whose user registered a hook on a parameter; the gate compares them too."""
    net = fill(Hooked(), scale=0.9)
    net.a.weight.register_hook(lambda grad: 2 * grad)
    running = parallelize(net, example_inputs=det(4, 4) * 2, microbatches=2, **how).launch()
    x, y = det(8, 4) * 2, torch.arange(8) % 3
    mine = slice(4 * running.ranks.at.dp, 4 * running.ranks.at.dp + 4)
    running.train_step(x[mine], y[mine], F.cross_entropy)
    result = running.gradients()
    running.close()
    return result
