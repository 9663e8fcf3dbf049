"""FSDP2's units on real ranks: equal to one process in float64, gathered ahead, reduced while backward runs, freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from snnpart.api import parallelize
from snnpart.errors import ConfigError, PlanError
from snnpart.runtime.unit import aligned
from tests.distributed.cases import Aux, det, fill, reset
from tests.distributed.jobs_fsdp2 import UNLIKE, Hooked
from tests.distributed.jobs_launch import both_answers, first_answer, second_answer
from tests.distributed.pool import Pool
from tests.distributed.reference import OneProcess, assert_same
from tests.distributed.test_cases import check, name_of

JOBS = "tests.distributed.jobs_fsdp2:"
KEPT, AGAIN = ({"dp": "fsdp2", "fsdp_units": 3, "fsdp_reshard": again} for again in (False, True))
KEPT9, AGAIN9 = ({**how, "fsdp_units": 9} for how in (KEPT, AGAIN))


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.all)


EQUAL: list[Any] = [
    ("norms", 2, {**KEPT, "microbatches": 2}),
    ("norms", 2, {**AGAIN, "microbatches": 2}),
    ("narrow", 3, AGAIN),
    slow("narrow", 2, KEPT9),
    slow("mobile", 2, AGAIN9),
    ("tied", 2, AGAIN),
    ("A12", 2, AGAIN9),
    slow("A14", 2, AGAIN),
    ("A28", 2, {**AGAIN, "microbatches": 2}),
    slow("still", 2, AGAIN),
    ("norms", 4, {**AGAIN, "tp": 2, "microbatches": 2}),
    slow("narrow", 4, {**KEPT, "tp": 2}),
    ("leaves", 4, {**AGAIN, "pp": 2, "microbatches": 3}),
    slow("leaves", 4, {**KEPT, "pp": 2, "microbatches": 3, "fsdp_units": 2}),
    ("wide", 4, {**AGAIN, "pp": 2, "microbatches": 3, "schedule": "zbv", "fsdp_units": 2}),
    ("wide", 4, {**KEPT, "pp": 2, "microbatches": 4, "schedule": "interleaved-1f1b", "fsdp_units": 2}),
]


@pytest.mark.parametrize(("name", "ranks", "how"), EQUAL, ids=name_of)
def test_equal_to_one_process(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    check(pool, name, ranks, how, learn=True)


@pytest.mark.parametrize("how", [KEPT, AGAIN], ids=["kept", "again"])
def test_gradients_accumulate_over_steps(pool: Pool, how: dict[str, Any]) -> None:
    check(pool, "A28", 2, {**how, "microbatches": 2})


def log_of(pool: Pool, **how: Any) -> dict[str, Any]:
    """What happens in a step of "norms": the same on both ranks."""
    first, second = pool.run(JOBS + "logged", ranks=2, name="norms", **how)
    assert first == second
    assert first["units"] == [0, 1, 2]
    assert first["between"] == 0
    found: dict[str, Any] = first
    return found


def test_the_next_unit_is_gathered_while_one_computes(pool: Pool) -> None:
    """And freed after forward; the last one, with which backward begins, is not."""
    events = log_of(pool, **AGAIN)["events"]
    assert events[:7] == [
        ("start", 0), ("gather", 0), ("start", 1), ("free", 0), ("gather", 1), ("start", 2), ("free", 1),
    ]  # fmt: skip
    assert events[7:] == [
        ("gather", 2), ("start", 1), ("free", 2), ("reduce", 2), ("gather", 1), ("start", 0), ("free", 1),
        ("reduce", 1), ("gather", 0), ("free", 0), ("reduce", 0),
    ]  # fmt: skip


def test_units_are_gathered_once_a_step_where_they_stay(pool: Pool) -> None:
    events = log_of(pool, **KEPT, microbatches=3)["events"]
    assert [event for event in events if event[0] in ("start", "gather")] == [
        ("start", 0), ("gather", 0), ("start", 1), ("gather", 1), ("start", 2), ("gather", 2),
    ]  # fmt: skip
    assert events[6:] == [("reduce", 2), ("reduce", 1), ("reduce", 0), ("free", 0), ("free", 1), ("free", 2)]


def test_an_evaluation_frees_each_unit(pool: Pool) -> None:
    found = log_of(pool, **AGAIN, evaluates=True)
    assert [event for event in found["events"] if event[0] == "free"] == [("free", 0), ("free", 1), ("free", 2)]
    assert not [event for event in found["events"] if event[0] == "reduce"]


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zbv"])
def test_a_second_half_of_backward_gathers_a_unit_once(pool: Pool, schedule: str) -> None:
    """However many layers of a unit accumulate their gradients; forward and each half come to it once."""
    for found in pool.run(JOBS + "gathers", ranks=4, schedule=schedule):
        assert len(found) == 2
        assert all(4 <= count <= 3 * 4 for count in found.values())


def test_two_units_are_whole_at_a_time(pool: Pool) -> None:
    (many,), (kept,) = (pool.run(JOBS + "logged", ranks=2, name="mobile", **how)[:1] for how in (AGAIN9, KEPT9))
    assert kept["most"] == kept["all"]
    assert many["most"] < 0.7 * many["all"]


@pytest.mark.parametrize("how", [AGAIN9, KEPT9], ids=["again", "kept"])
def test_what_is_gathered_and_what_is_in_shards_is_predicted(pool: Pool, how: dict[str, Any]) -> None:
    """Tensors begin at aligned places in memory, and ranks have whole rows of dim 0. Sharded again, no two neighbours
    hold more than is said; which two are whole together depends on where the first and the last reader are."""
    found = pool.run(JOBS + "logged", ranks=2, name="mobile", **how)[0]
    least = found["gathered"] if how is KEPT9 else 0.75 * found["gathered"]
    assert least <= found["most"] <= found["gathered"] + found["tensors"] * aligned(1)
    assert found["shards"] == pytest.approx(found["predicted shards"], rel=0.1)


@pytest.mark.parametrize("how", [KEPT, AGAIN], ids=["kept", "again"])
@pytest.mark.parametrize("execution", ["cuda_graph", pytest.param("compile", marks=pytest.mark.all)])
def test_other_executions_are_eager_steps(pool: Pool, how: dict[str, Any], execution: str) -> None:
    job = "tests.distributed.jobs_execution:train_case"
    eager, other = (pool.run(job, ranks=2, name="norms", execution=e, **how) for e in ("eager", execution))
    for want, got in zip(eager, other, strict=True):
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-9)
        assert_same(got["gradients"], want["gradients"])
        assert_same(got["state"], want["state"])


@pytest.mark.parametrize("how", [pytest.param(KEPT, marks=pytest.mark.all), AGAIN], ids=["kept", "again"])
def test_inputs_that_are_kept_as_bits(pool: Pool, how: dict[str, Any]) -> None:
    """Convolutions that pack what they keep need their weights in backward too."""
    job = {"ranks": 2, "precision": "fp32", "saved": "packed"}
    ddp, found = pool.run(JOBS + "autocast", dp="ddp", **job), pool.run(JOBS + "autocast", **job, **how)
    for want, got in zip(ddp, found, strict=True):
        assert got["packed"] > 0
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-6)
        assert_same(got["gradients"], want["gradients"], 1e-5)


@pytest.mark.all
def test_what_autocast_rounds_is_gathered_rounded(pool: Pool) -> None:
    """Losses, gradients over two microbatches and outputs are those of DDP; weights of convolutions take half."""
    job = {"ranks": 2, "precision": "bf16", "microbatches": 2}
    ddp = pool.run(JOBS + "autocast", dp="ddp", **job)
    for how in (KEPT, AGAIN, {**AGAIN, "execution": "cuda_graph"}):
        for want, got in zip(ddp, pool.run(JOBS + "autocast", **job, **how), strict=True):
            assert got["losses"] == pytest.approx(want["losses"], abs=1e-6)
            assert_same(got["gradients"], want["gradients"], 1e-5)
            assert_same({"out": got["outputs"].float()}, {"out": want["outputs"].float()}, 1e-5)
            assert 0 < got["sent"] < 0.6 * got["held"]


@pytest.mark.parametrize(("units", "reshard"), [(1, False), (3, False), (3, True)])
def test_losses_that_reach_other_parameters(pool: Pool, units: int, reshard: bool) -> None:
    """A parameter that no rank's loss reaches has no gradient, one that a later loss reaches has the right one."""
    found = pool.run(JOBS + "unreached", ranks=2, units=units, reshard=reshard)
    for i, loss in enumerate((first_answer, both_answers, second_answer, first_answer)):
        one = OneProcess(fill(Aux()), reset=reset)
        x, y = det(8, 4, k=0.3 + 0.1 * i), torch.arange(8) % 3
        one.train_step([(x[:4], y[:4]), (x[4:], y[4:])], loss)
        for gradients in found:
            assert_same(gradients[i], one.gradients())


@pytest.mark.parametrize("units", [1, 3])
def test_losses_that_reach_other_parameters_on_each_rank(pool: Pool, units: int) -> None:
    """What one rank's loss reaches has a gradient on all: the mean, to which the others add nothing."""
    found = pool.run(JOBS + "unlike", ranks=2, units=units)
    for i, losses in enumerate(UNLIKE):
        model, x, y = fill(Aux()), det(8, 4, k=0.3 + 0.1 * i), torch.arange(8) % 3
        for rank, loss in enumerate(losses):
            part = slice(4 * rank, 4 * rank + 4)
            reset(model)
            (loss(model(x[part]), y[part]) / 2).backward()
        wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for gradients in found:
            assert_same(gradients[i], wanted)


def test_hooks_after_accumulation_run_once_a_step(pool: Pool) -> None:
    one = OneProcess(fill(Hooked(), scale=0.9), reset=reset, microbatches=2)
    x, y = det(8, 4) * 2, torch.arange(8) % 3
    one.train_step([(x[:4], y[:4]), (x[4:], y[4:])], F.cross_entropy)
    wanted = one.gradients()
    wanted["a.weight"] *= 2
    for calls, gradients in pool.run(JOBS + "hooked", ranks=2, where="accumulate"):
        assert calls == [(6, 4)]
        assert_same(gradients, wanted)


def test_gradient_hooks_on_shards_are_refused(pool: Pool) -> None:
    for text in pool.run(JOBS + "hooked", ranks=2, where="gradient"):
        assert text.startswith("LaunchError: stage 0: a hook was registered on 'a.weight', which under dp=\"fsdp2\"")
        assert "register_post_accumulate_grad_hook" in text


@pytest.mark.parametrize("reshard", [False, True])
def test_dp_ranks_with_other_numbers_of_microbatches(pool: Pool, reshard: bool) -> None:
    """Equal to one process where parameters stay; refused on both ranks, before anything is sent, where they do not."""
    one = OneProcess(fill(Hooked(), scale=0.9), reset=reset, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    wanted = []
    for sizes in ((2, 2), (2, 1), (1, 1)):
        if reshard and sizes == (2, 1):
            wanted.append(None)
            continue
        xs, ys = (part.split(sizes) for part in (det(sum(sizes), 4) * 2, torch.arange(sum(sizes)) % 3))
        wanted.append(one.train_step(list(zip(xs, ys, strict=True)), F.cross_entropy))
    for found in pool.run(JOBS + "few_samples", ranks=2, reshard=reshard):
        for got, want in zip(found, wanted, strict=True):
            if want is None:
                assert got.startswith("ConfigError: the dp ranks have [2, 1] microbatches")
            else:
                assert got == pytest.approx(want, abs=1e-9)


def doubling() -> Hooked:
    """A network whose user rewrites a gradient."""
    net = fill(Hooked(), scale=0.9)
    net.a.weight.register_hook(lambda grad: 2 * grad)
    return net


@pytest.mark.parametrize("how", [{"dp": "ddp"}, KEPT, AGAIN], ids=name_of)
def test_hooks_on_the_users_parameters_run_on_their_copies(pool: Pool, how: dict[str, Any]) -> None:
    one = OneProcess(doubling(), reset=reset, microbatches=2)
    x, y = det(8, 4) * 2, torch.arange(8) % 3
    one.train_step([(x[:4], y[:4]), (x[4:], y[4:])], F.cross_entropy)
    for gradients in pool.run(JOBS + "doubled", ranks=2, **how):
        assert_same(gradients, one.gradients())


def test_hooks_that_would_not_see_what_they_were_made_for_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'a.weight' has a gradient hook(.|\n)*shard=\{\"a\": \"replicate\"\}"):
        parallelize(doubling(), example_inputs=det(4, 4) * 2, tp=2, shard={"a": "column"})
    net = fill(Hooked(), scale=0.9)
    net.a.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"'a.weight' has a hook that runs after(.|\n)*named_parameters"):
        parallelize(net, example_inputs=det(4, 4) * 2)
