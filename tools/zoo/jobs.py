"""What ranks do with a network of the zoo on real process groups; the pool of the distributed tests calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import frameworks, parallelize
from snnpart.errors import SnnpartError
from snnpart.gate.draws import WithoutDraws
from tests.distributed.jobs import ramp
from tests.distributed.pool import JobFailed, Pool
from tests.distributed.reference import OneProcess
from tests.distributed.test_zoo import is_neuron_state
from tools.zoo.catalogue import ZOO, Entry
from tools.zoo.check import TOLERANCES, Outcome, differences, own_reset, refusal, told


def step(name: str, **topology: Any) -> dict[str, Any]:
    """One step, dp rank r on the inputs of seed r: loss, gradients, state, outputs; or how it was refused."""
    torch.set_num_threads(1)
    entry = ZOO[name]
    module, inputs = entry.make()
    try:
        running: Any = parallelize(module, example_inputs=inputs, verify="off", **entry.options, **topology).launch()
        mine = entry.inputs(seed=running.ranks.at.dp)
        with WithoutDraws():  # ranks draw other numbers than one process
            result: dict[str, Any] = {"outputs": tensors(running.eval_step(mine))}
            if entry.training:
                result["loss"] = running.train_step(mine, torch.zeros(mine[0].shape[entry.in_dims]), ramp).item()
                result["gradients"] = running.gradients()
        result["state"] = running.state_dict()
        running.close()
    except SnnpartError as error:
        return {"refused": refusal(error)}
    return result


def tensors(outputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def check(
    pool: Pool, name: str, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1, schedule: str | None = None
) -> Outcome:
    """The same step on process groups and in one process."""
    topology = {"tp": tp, "pp": pp, "microbatches": microbatches, "schedule": schedule}
    try:
        results = pool.run("tools.zoo.jobs:step", ranks=dp * tp * pp, name=name, **topology)
    except JobFailed as failed:
        return Outcome("error", " | ".join(str(failed).strip().splitlines()[-1:]))
    if refused := next((result["refused"] for result in results if "refused" in result), ""):
        return Outcome("refused", refused)
    found: dict[str, float] = {}
    for rank, (result, want) in enumerate((r, w) for r, w in zip(results, expected(name, dp, tp * pp, microbatches))):
        for kind in want:
            found |= {f"rank {rank}: {k}": v for k, v in differences(kind, want[kind], numbered(result[kind])).items()}
    worst = max(found, key=lambda key: found[key])
    equal = found[worst] <= TOLERANCES[ZOO[name].dtype]
    return Outcome("equal" if equal else "differs", "" if equal else f"{worst} by {found[worst]:.2g}", found[worst])


def numbered(values: Any) -> dict[Any, Tensor]:
    """Tensors by name, also those of a list and a plain number."""
    if isinstance(values, float):
        return {0: torch.tensor(values, dtype=torch.float64)}
    return dict(enumerate(values)) if isinstance(values, list) else values  # type: ignore[no-any-return]


def expected(name: str, dp: int, per_pipeline: int, microbatches: int) -> list[dict[str, Any]]:
    """What every rank must give, computed in this process."""
    entry = ZOO[name]
    module, _ = entry.make()
    one = OneProcess(
        module,
        microbatches=microbatches,
        reset=frameworks.reset_state,
        batch_dim=entry.in_dims,
        call=lambda m, x: entry.call(told(m, x.shape[entry.in_dims]), (x,)),
    )
    batches = [entry.inputs(seed=rank)[0] for rank in range(dp)]
    same: dict[str, Any] = {}
    with WithoutDraws():
        outputs = [dict(enumerate(tensors(one.evaluate(x)))) for x in batches]
    module.train(entry.training)
    if entry.training:
        with WithoutDraws():
            loss = one.train_step([(x, torch.zeros(x.shape[entry.in_dims])) for x in batches], ramp)
        same = {"loss": {0: torch.tensor(loss, dtype=torch.float64)}, "gradients": one.gradients()}
    same["state"] = state_of(module, entry)
    return [{**same, "outputs": outputs[rank // per_pipeline]} for rank in range(dp * per_pipeline)]


def state_of(module: nn.Module, entry: Entry) -> dict[str, Tensor]:
    """The state_dict without a framework's membranes, after the network's own reset."""
    own_reset(module)
    return {key: value for key, value in module.state_dict().items() if not is_neuron_state(module, key)}
