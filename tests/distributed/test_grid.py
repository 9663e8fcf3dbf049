"""Every schedule with every number of microbatches: equal to one process, or refused by name.

The small grid runs one chain of neuron layers over 2, 3 and 4 ranks; the large one networks of every kind, with uneven
microbatches (three samples) and two updates. By default each schedule meets each number of ranks, and each network a
schedule; the whole product is marked `all`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from snnpart import schedules
from snnpart.api import parallelize
from snnpart.errors import PlanError
from snnpart.frameworks import reset_state
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.grid_nets import NETS, build, inputs, options
from tests.distributed.jobs import ramp
from tests.distributed.jobs_grid import sgd
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same, even
from tests.distributed.test_cases import assert_active, check
from tests.distributed.test_zoo import is_neuron_state

CHAIN = list(itertools.product((2, 3, 4), schedules.NAMES, (1, 2, 3, 4, 5)))
COVERING = {
    (2, "gpipe", 5), (3, "gpipe", 2), (4, "gpipe", 3), (2, "1f1b", 5), (3, "1f1b", 4), (4, "1f1b", 5),
    (2, "interleaved-1f1b", 3), (3, "interleaved-1f1b", 5), (4, "interleaved-1f1b", 2),
    (2, "interleaved-zb", 3), (3, "interleaved-zb", 2), (4, "interleaved-zb", 4),
    (2, "zbv", 5), (3, "zbv", 4), (4, "zbv", 3),
}  # fmt: skip


def _marked(cases: list[Any], default: Any) -> list[Any]:
    return [pytest.param(*case, marks=() if case in default else pytest.mark.all) for case in cases]


@pytest.mark.parametrize(("pp", "schedule", "microbatches"), _marked(CHAIN, COVERING))
def test_a_chain_of_neurons(pool: Pool, pp: int, schedule: str, microbatches: int) -> None:
    """Ten samples; interleaved schedules cut the chain into eight stages over four ranks."""
    how = {"pp": pp, "schedule": schedule, "microbatches": microbatches}
    if schedules.takes(schedule, pp, microbatches):
        check(pool, "leaves", pp, how, learn=True)
    else:
        with pytest.raises(PlanError, match=f"schedule='{schedule}' over pp={pp} ranks"):
            compile_case(CASES["leaves"], **how)


def test_the_covering_part_meets_each_schedule_on_each_number_of_ranks() -> None:
    able = {(pp, name) for pp, name, m in COVERING if schedules.takes(name, pp, m)}
    assert able == set(itertools.product((2, 3, 4), schedules.NAMES))


Net = tuple[str, int, dict[str, Any]]
DEFAULT: list[Net] = [
    ("small_sew-m", 2, {"pp": 2, "schedule": "interleaved-zb", "microbatches": 3}),
    ("unet", 3, {"pp": 3, "schedule": "interleaved-1f1b", "microbatches": 3}),
    ("spikformer", 2, {"pp": 2, "schedule": "interleaved-zb", "microbatches": 2}),
    ("snntorch_leaky", 2, {"pp": 2, "schedule": "zbv", "microbatches": 2}),
    ("norse_sequential", 2, {"pp": 2, "schedule": "interleaved-1f1b", "microbatches": 2}),
    ("recurrent", 4, {"pp": 2, "dp": "fsdp2", "schedule": "1f1b", "microbatches": 2}),
    ("two_inputs", 2, {"pp": 2, "schedule": "zbv", "microbatches": 2}),
    ("two_inputs", 4, {"pp": 2, "tp": 2, "schedule": "interleaved-zb", "microbatches": 2}),
    ("two_inputs", 4, {"pp": 4, "schedule": "1f1b", "microbatches": 5}),
]
TOPOLOGIES: list[tuple[int, dict[str, Any]]] = [
    (2, {"pp": 2}), (3, {"pp": 3}), (4, {"pp": 4}), (4, {"pp": 2, "tp": 2}), (4, {"pp": 2, "dp": "ddp"}),
    (4, {"pp": 2, "dp": "fsdp2"}),
]  # fmt: skip
EVERY: list[Net] = [
    (name, ranks, {**how, "schedule": schedule, "microbatches": m})
    for name, (ranks, how), schedule, m in itertools.product(NETS, TOPOLOGIES, schedules.NAMES, (1, 2, 3, 4, 5))
    if len(how) == 1 or m in (2, 3)
]


@pytest.mark.parametrize(
    ("name", "ranks", "how"),
    _marked([*DEFAULT, *(case for case in EVERY if case not in DEFAULT)], DEFAULT),
    ids=lambda v: str(v).replace(" ", ""),
)
def test_networks(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """Losses, gradients, statistics and weights after two updates, or a refusal that names the reason."""
    if name not in NETS:
        pytest.skip("its framework is not installed")
    try:
        parallelize(build(name), example_inputs=inputs(name, 3, 0), **options(name), **how)
    except PlanError as refusal:
        assert not _in_default(name, ranks, how), refusal
        assert "can be cut into at most" in str(refusal) or "valid: " in str(refusal)
        return
    dp = ranks // (how["pp"] * how.get("tp", 1))
    wanted = one_process(name, dp, how["microbatches"])
    for result in pool.run("tests.distributed.jobs_grid:run", ranks=ranks, name=name, batch=3, **how):
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-9)
        assert_same(result["gradients"], wanted["gradients"])
        assert_same({key: result["state"][key] for key in wanted["state"]}, wanted["state"])


def _in_default(name: str, ranks: int, how: dict[str, Any]) -> bool:
    return (name, ranks, how) in DEFAULT


def one_process(name: str, dp: int, microbatches: int) -> dict[str, Any]:
    """Two steps of three samples a dp rank, gradients accumulated over microbatches; dp rank 0's statistics stay."""
    module, net = build(name), NETS[name]
    assert_active(module, lambda: net.call(module, inputs(name, 3, 0)))
    optimizer, losses = sgd([p for p in module.parameters() if p.requires_grad]), []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(sum(_dp_rank(name, module, rank, step, microbatches) for rank in range(dp)) / dp)
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / dp
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        assert all(grad.abs().max() > 0 for grad in gradients.values())
        optimizer.step()
    reset_state(module)
    state = {key: value for key, value in module.state_dict().items() if not is_neuron_state(module, key)}
    return {"losses": losses, "gradients": gradients, "state": state}


def _dp_rank(name: str, module: torch.nn.Module, rank: int, step: int, microbatches: int) -> float:
    """The mean loss of one dp rank's samples."""
    net, total = NETS[name], 0.0
    before = {key: value.clone() for key, value in module.state_dict().items() if "running" in key or "num_b" in key}
    sizes = even(3, min(microbatches, 3))
    parts = [x.split(sizes, net.in_dims) for x in inputs(name, 3, rank + 10 * step)]
    for size, *given in zip(sizes, *parts, strict=True):
        reset_state(module)
        loss = ramp(net.call(module, tuple(given)), None) * (size / 3)
        loss.backward()
        total += loss.item()
    if rank > 0:
        module.load_state_dict(before, strict=False)
    return total
