"""Parameters of which several stages hold a copy: losses, gradients, updates and state of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from snnpart import schedules
from snnpart.api import parallelize
from snnpart.errors import LaunchError
from snnpart.plan import Plan
from snnpart.runtime.checkpoint import read_model
from tests.distributed.case import fill, reset
from tests.distributed.cases_tied import TIED, LanguageModel
from tests.distributed.jobs_tied import ROWS, Counting, TwoOutputs, early, late, sgd
from tests.distributed.pool import JobFailed, Pool
from tests.distributed.reference import OneProcess, assert_same
from tests.distributed.test_cases import check, name_of
from tests.distributed.test_checkpoint import MIXED, MIXED_FSDP, ONE, PP, check_goes_on

JOBS = "tests.distributed.jobs_tied:"
ENDS = {"tied ends": ("emb.weight",), "shared conv": ("conv.bias", "conv.weight", "scale")}
COPIED = {**ENDS, "everywhere": ("layer.bias", "layer.weight")}
DEEP = {"ranks": 3, "pp": 3, "microbatches": 3}


@pytest.mark.parametrize(
    ("name", "ranks", "how"),
    [
        ("tied ends", 2, {"pp": 2, "schedule": "gpipe", "microbatches": 1}),
        ("shared conv", 2, {"pp": 2, "schedule": "zbv", "microbatches": 3}),
        ("tied ends", 3, {"pp": 3, "schedule": "interleaved-zb", "microbatches": 3}),
        pytest.param("shared conv", 3, {"pp": 3, "schedule": "1f1b", "microbatches": 4}, marks=pytest.mark.all),
        pytest.param("tied ends", 4, {"pp": 4, "schedule": "1f1b", "microbatches": 5}, marks=pytest.mark.all),
        ("tied ends", 4, {"pp": 4, "schedule": "zbv", "microbatches": 2}),
        ("shared conv", 4, {"pp": 2, "dp": "ddp", "schedule": "1f1b", "microbatches": 2}),
        ("tied ends", 4, {"pp": 2, "dp": "ddp", "schedule": "interleaved-zb", "microbatches": 2}),
        ("tied ends", 4, {"pp": 2, "dp": "fsdp2", "schedule": "1f1b", "microbatches": 2}),
        pytest.param(
            "shared conv",
            4,
            {"pp": 2, "dp": "fsdp2", "schedule": "interleaved-1f1b", "microbatches": 2},
            marks=pytest.mark.all,
        ),
        pytest.param("tied ends", 4, {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 2}, marks=pytest.mark.all),
        ("shared conv", 4, {"pp": 2, "tp": 2, "schedule": "interleaved-zb", "microbatches": 2}),
        ("everywhere", 3, {"pp": 3, "schedule": "1f1b", "microbatches": 3, "split_at": ["norms.2", "norms.4"]}),
        ("everywhere", 4, {"pp": 2, "dp": "fsdp2", "schedule": "zbv", "microbatches": 2}),
    ],
    ids=name_of,
)
def test_copies_take_the_steps_of_one_parameter(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """Two updates with clipping, whose norm counts each number once."""
    results = check(pool, name, ranks, how, learn=True, clip=0.05)
    assert Plan.from_json(results[0]["plan"]).tied == COPIED[name]


@pytest.mark.parametrize(
    ("name", "ranks", "how"),
    [
        ("shared number", 2, {"tp": 2}),
        ("shared number", 2, {"pp": 2, "microbatches": 2}),
        ("shared number", 2, {"dp": "fsdp2"}),
        pytest.param("shared number", 4, {"pp": 2, "tp": 2}, marks=pytest.mark.all),
        ("shared numbers", 2, {"tp": 2}),
        ("shared numbers", 2, {"dp": "fsdp2", "fsdp_units": 2, "fsdp_reshard": True}),
    ],
    ids=name_of,
)
def test_a_number_that_neuron_layers_hold_is_learned(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """`self.tau = nn.Parameter(...)`, given to the layers in a tuple of parameters."""
    pytest.importorskip("norse")
    result = check(pool, name, ranks, how, learn=True, clip=0.05)[0]
    assert result["gradients"]["tau"].abs().min() > 1e-9 and list(result["state"])[0] == "tau"


PLACES: list[tuple[int, dict[str, Any]]] = [
    (2, {"pp": 2, "microbatches": 4}), (3, {"pp": 3, "microbatches": 4}), (4, {"pp": 4, "microbatches": 4}),
    (4, {"pp": 2, "dp": "ddp", "microbatches": 2}), (4, {"pp": 2, "dp": "fsdp2", "microbatches": 2}),
    (4, {"pp": 2, "tp": 2, "microbatches": 4}),
]  # fmt: skip


@pytest.mark.all
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("ranks", "how"), PLACES, ids=name_of)
def test_every_schedule_everywhere(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    for schedule in schedules.NAMES:
        if name == "shared conv" and how["pp"] * schedules.stages_per_rank(schedule, how["pp"], 0) == 8:
            continue  # it has fewer parts than that
        if not schedules.takes(schedule, how["pp"], how["microbatches"]):
            continue
        results = check(pool, name, ranks, {**how, "schedule": schedule}, learn=True, clip=0.05)
        assert Plan.from_json(results[0]["plan"]).tied == ENDS[name]


def test_gradients_add_up_over_steps(pool: Pool) -> None:
    """Without an optimizer: what earlier steps left is a sum already and is not summed again."""
    check(pool, "tied ends", 3, {"pp": 3, "schedule": "gpipe", "microbatches": 2})


@pytest.mark.parametrize(
    "how",
    [
        DEEP,
        {"ranks": 4, "pp": 2, "microbatches": 2},
        pytest.param({"ranks": 4, "pp": 2, "dp": "fsdp2", "microbatches": 2}, marks=pytest.mark.all),
        {"ranks": 4, "pp": 2, "tp": 2, "microbatches": 2, "schedule": "zbv"},
    ],
    ids=name_of,
)
@pytest.mark.parametrize("execution", [pytest.param("eager", marks=pytest.mark.all), "cuda_graph"])
def test_copies_stay_equal_to_the_bit(pool: Pool, how: dict[str, Any], execution: str) -> None:
    """Parameters and momentum after four steps, eager and static; losses and state are one process's, and
    so is what comes of shorter sequences, for which the same plan is compiled."""
    results = pool.run(JOBS + "train", name="tied ends", execution=execution, **how)
    case = TIED["tied ends"]
    one = OneProcess(case.model(), microbatches=how["microbatches"], optimizer=sgd, clip=0.05, reset=reset)
    dp = how["ranks"] // (how["pp"] * how.get("tp", 1))
    losses = [
        one.train_step(list(zip(x.tensor_split(dp), y.tensor_split(dp), strict=True)), case.loss_fn(len(x)))
        for x, y in case.batches() * 2
    ]
    shorter = one.evaluate(case.batches()[0][0][:, :3])
    held: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
    for result in results:
        assert result["tied"] == ("emb.weight",)
        assert result["losses"] == pytest.approx(losses, abs=1e-9)
        assert_same(result["state"], one.model.state_dict())
        assert_same({"shorter": result["shorter"]}, {"shorter": shorter})
        held.setdefault(result["at"], []).extend(result["copies"].values())
    for first, *others in held.values():
        assert len(others) == (0 if how.get("schedule") == "zbv" else 1)  # the ends of the V lie on one rank
        assert len(first) == 2 and all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("order", [("early",), ("late", "early"), ("early", "early")])
def test_a_loss_that_reaches_one_copy(pool: Pool, order: tuple[str, ...]) -> None:
    one = OneProcess(fill(TwoOutputs(), scale=0.9), microbatches=2, reset=reset)
    (x, y), _ = ROWS()
    for name in order:
        one.train_step([(x, y)], {"early": early, "late": late}[name])
    for result in pool.run(JOBS + "reaches", ranks=2, order=order):
        assert result["error"] == ""
        wanted = one.gradients()  # earlier stages are sent zeros for what the loss does not reach
        assert_same({name: result["gradients"].pop(name) for name in wanted}, wanted)
        assert not any(grad.any() for grad in result["gradients"].values())


@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer"),
    [
        (PP, MIXED_FSDP, "adam"),
        pytest.param(MIXED, ONE, "adamw", marks=pytest.mark.all),
        pytest.param(ONE, PP, "sgd", marks=pytest.mark.all),
        pytest.param({"ranks": 4, "pp": 2, "dp": "fsdp2"}, PP, "adam", marks=pytest.mark.all),
    ],
)
def test_a_checkpoint_holds_it_once(
    pool: Pool, tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], optimizer: str
) -> None:
    """Saving fails where two ranks write one number; both copies, their optimizer state too, go on from it."""
    weights = check_goes_on(pool, tmp_path, "tied", optimizer, saved, loaded)
    assert_same(read_model(tmp_path / "step-00000003"), {k: v for k, v in weights.items() if k != "head.weight"})


def one_step() -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and state of one step of a single process."""
    one = OneProcess(fill(LanguageModel(), scale=0.9), microbatches=2, optimizer=sgd, reset=reset)
    (x, y), _ = ROWS()
    return one.train_step([(x, y)], TIED["tied ends"].loss_fn(len(x))), one.model.state_dict()


def test_values_for_a_network_without_numbers(pool: Pool) -> None:
    loss, state = one_step()
    for result in pool.run(JOBS + "from_values", ranks=2, pp=2, microbatches=2):
        assert result["tied"] == ("emb.weight",)
        assert result["loss"] == pytest.approx(loss, abs=1e-9)
        assert_same(result["state"], state)


def test_a_program_on_disk(pool: Pool, tmp_path: Path) -> None:
    (x, _), _ = ROWS()
    program = parallelize(fill(LanguageModel(), scale=0.9), pp=2, example_inputs=x, microbatches=2, verify="off")
    program.save(tmp_path / "program")
    loss, state = one_step()
    for result in pool.run(JOBS + "saved_program", ranks=2, folder=str(tmp_path / "program")):
        assert result["loss"] == pytest.approx(loss, abs=1e-9)
        assert_same(result["state"], state)


def test_buffers_that_nothing_writes_have_copies_and_may_not_be_written_later(pool: Pool) -> None:
    """Compiled for evaluation; the train graph would change one copy alone."""
    model, x = fill(Counting(), scale=0.9).eval(), TIED["everywhere"].batches()[0][0][:, :4]
    for result in pool.run(JOBS + "counting", ranks=2):
        assert result["tied"] == ("seen",)
        torch.testing.assert_close(result["outputs"], model(x), rtol=0, atol=1e-9)
        assert "LaunchError" in result["error"] and "['seen'] lie elsewhere in the new graph" in result["error"]


@pytest.mark.all
def test_a_rank_that_does_not_come_to_the_exchange_is_named(pool: Pool) -> None:
    with pytest.raises(JobFailed) as failed:
        pool.run(JOBS + "late_to_the_exchange", ranks=2)
    error = failed.value.errors[0]
    assert isinstance(error, LaunchError) and "rank 0 (dp 0, pp 0, tp 0), stage 0" in error.where
    with pytest.raises(LaunchError, match=r"reducing partial gradients failed: .*rank 1 \(dp 0, pp 1, tp 0\)"):
        raise error


def test_a_matrix_that_does_not_learn_is_not_exchanged(pool: Pool) -> None:
    before = fill(LanguageModel(), scale=0.9).state_dict()
    for result in pool.run(JOBS + "frozen", ranks=2):
        assert result["tied"] == ("emb.weight",) and result["groups"] == 0
        assert torch.equal(result["state"]["emb.weight"], before["emb.weight"])
        assert not torch.equal(result["state"]["norm.weight"], before["norm.weight"])
