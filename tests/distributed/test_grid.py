"""Every schedule with every number of microbatches: equal to one process, or refused by name.

By default one chain of neuron layers meets each schedule on each number of ranks, and each network a schedule. The
covering rows (`grid_rows`) are marked `all`: those of one topology and schedule are one job of the workers.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from snnpart import schedules
from snnpart.api import parallelize
from snnpart.errors import PlanError
from snnpart.frameworks import reset_state
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.grid_nets import MOST, NETS, build, inputs, options
from tests.distributed.grid_rows import COUNTS, TOPOLOGIES, Row, covering, every
from tests.distributed.jobs import ramp
from tests.distributed.jobs_grid import sgd
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same, even
from tests.distributed.test_cases import assert_active, check
from tests.distributed.test_zoo import is_neuron_state

CHAIN = [
    (2, "gpipe", 5), (3, "gpipe", 2), (4, "gpipe", 3), (2, "1f1b", 5), (3, "1f1b", 4), (4, "1f1b", 5),
    (2, "interleaved-1f1b", 3), (3, "interleaved-1f1b", 5), (4, "interleaved-1f1b", 2),
    (2, "interleaved-zb", 3), (3, "interleaved-zb", 2), (4, "interleaved-zb", 4),
    (2, "zbv", 5), (3, "zbv", 4), (4, "zbv", 3),
]  # fmt: skip


@pytest.mark.parametrize(("pp", "schedule", "microbatches"), CHAIN)
def test_a_chain_of_neurons(pool: Pool, pp: int, schedule: str, microbatches: int) -> None:
    """Ten samples; interleaved schedules cut the chain into eight stages over four ranks."""
    check(pool, "leaves", pp, {"pp": pp, "schedule": schedule, "microbatches": microbatches}, learn=True)


def test_the_chain_meets_each_schedule_on_each_number_of_ranks() -> None:
    assert {(pp, name) for pp, name, _ in CHAIN} == set(itertools.product((2, 3, 4), schedules.NAMES))


NOT_TAKEN = [
    (pp, name, m)
    for pp, name, m in itertools.product((2, 3, 4), schedules.NAMES, COUNTS)
    if not schedules.takes(name, pp, m)
]


@pytest.mark.parametrize(("pp", "schedule", "microbatches"), NOT_TAKEN)
def test_a_number_that_a_schedule_does_not_take_is_refused(pp: int, schedule: str, microbatches: int) -> None:
    with pytest.raises(PlanError, match=f"schedule='{schedule}' over pp={pp} ranks"):
        compile_case(CASES["leaves"], pp=pp, schedule=schedule, microbatches=microbatches)


DEFAULT = [
    Row("small_sew-m", "interleaved-zb", "pp2", 3), Row("unet", "interleaved-1f1b", "pp3", 3),
    Row("spikformer", "interleaved-zb", "pp2", 2), Row("snntorch_leaky", "zbv", "pp2", 2),
    Row("norse_sequential", "interleaved-1f1b", "pp2", 2), Row("recurrent", "1f1b", "pp2-fsdp2", 2),
    Row("two_inputs", "zbv", "pp2", 2), Row("two_inputs", "interleaved-zb", "pp2-tp2", 2),
    Row("two_inputs", "1f1b", "pp4", 5),
]  # fmt: skip


@pytest.mark.parametrize("row", [row for row in DEFAULT if row.name in NETS], ids=lambda row: "-".join(row.text))
def test_networks(pool: Pool, row: Row) -> None:
    """Losses, gradients, statistics and weights after two updates."""
    run(pool, [row])


@pytest.mark.all
@pytest.mark.parametrize("schedule", schedules.NAMES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_covering_rows(pool: Pool, topology: str, schedule: str) -> None:
    run(pool, [row for row in covering() if (row.topology, row.schedule) == (topology, schedule)])


def run(pool: Pool, rows: list[Row]) -> None:
    """Run the rows, which are of one number of ranks, in one job and compare each with one process."""
    (ranks,) = {row.ranks for row in rows}
    jobs = [(row.name, row.batch, row.how) for row in rows]
    of_rank = pool.run("tests.distributed.jobs_grid:run_all", ranks=ranks, timeout=90.0 * len(rows), jobs=jobs)
    for number, row in enumerate(rows):
        dp = row.ranks // (row.how["pp"] * row.how.get("tp", 1))
        wanted = one_process(row.name, dp, row.microbatches, row.batch)
        for results in of_rank:
            result = results[number]
            assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-9), row
            assert_same(result["gradients"], wanted["gradients"])
            assert_same({key: result["state"][key] for key in wanted["state"]}, wanted["state"])


def test_the_rows_meet_all_that_can_meet() -> None:
    """Each schedule with each number of microbatches that it takes on each topology, and each network with each
    schedule, topology and number, and schedule on each topology."""
    rows = covering()
    assert set().union(*(row.pairs for row in rows)) == set().union(*(row.pairs for row in every()))
    met = {(row.schedule, row.how["pp"], row.microbatches) for row in rows}
    taken = {
        (s, pp, m) for pp, s, m in itertools.product((2, 3, 4), schedules.NAMES, COUNTS) if schedules.takes(s, pp, m)
    }
    assert met == taken
    assert {(row.name, row.schedule) for row in rows} >= {(n, s) for n in NETS for s in schedules.NAMES if MOST[n] >= 4}


@pytest.mark.parametrize("name", NETS)
def test_a_network_is_cut_into_as_many_stages_as_it_can_be(name: str) -> None:
    with pytest.raises(PlanError, match=f"can be cut into at most {MOST[name]} stages"):
        parallelize(build(name), example_inputs=inputs(name, 3, 0), **options(name), pp=64, microbatches=64)


@cache
def one_process(name: str, dp: int, microbatches: int, batch: int) -> dict[str, Any]:
    """Two steps of `batch` samples a dp rank, gradients accumulated over microbatches; dp rank 0's statistics stay."""
    module, net = build(name), NETS[name]
    assert_active(module, lambda: net.call(module, inputs(name, batch, 0)))
    optimizer, losses = sgd([p for p in module.parameters() if p.requires_grad]), []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(sum(_dp_rank(name, module, rank, step, microbatches, batch) for rank in range(dp)) / dp)
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / dp
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        assert all(grad.abs().max() > 0 for grad in gradients.values())
        optimizer.step()
    reset_state(module)
    state = {key: value for key, value in module.state_dict().items() if not is_neuron_state(module, key)}
    return {"losses": losses, "gradients": gradients, "state": state}


def _dp_rank(name: str, module: torch.nn.Module, rank: int, step: int, microbatches: int, batch: int) -> float:
    """The mean loss of one dp rank's samples."""
    net, total = NETS[name], 0.0
    before = {key: value.clone() for key, value in module.state_dict().items() if "running" in key or "num_b" in key}
    sizes = even(batch, min(microbatches, batch))
    parts = [x.split(sizes, net.in_dims) for x in inputs(name, batch, rank + 10 * step)]
    for size, *given in zip(sizes, *parts, strict=True):
        reset_state(module)
        loss = ramp(net.call(module, tuple(given)), None) * (size / batch)
        loss.backward()
        total += loss.item()
    if rank > 0:
        module.load_state_dict(before, strict=False)
    return total
