"""Launch, state and errors: what goes wrong on one rank is said on all of them, and never ends in a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from snnpart.api import parallelize
from snnpart.errors import ConfigError
from snnpart.runtime.launch import launch
from tests.distributed.cases import Aux, det, fill, mlp, reset
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch
from tests.distributed.jobs_launch import Larger, Moody, both_answers, first_answer
from tests.distributed.pool import JobFailed, Pool
from tests.distributed.reference import OneProcess, assert_same

JOBS = "tests.distributed.jobs_launch:"


def same_on_all(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results)
    return results[0]


def test_another_plan_on_one_rank(pool: Pool) -> None:
    kind, text = same_on_all(pool.run(JOBS + "other_plan_on_rank", ranks=4, rank=2))
    assert kind == "LaunchError"
    assert "the plan of rank 2 differs from that of rank 0" in text


def test_other_code_on_one_rank(pool: Pool) -> None:
    kind, text = same_on_all(pool.run(JOBS + "other_code_on_rank", ranks=4, rank=3))
    assert kind == "LaunchError"
    assert "the stage graphs of rank 3 differs" in text


def test_second_launch(pool: Pool) -> None:
    second, closed, loss = same_on_all(pool.run(JOBS + "twice", ranks=2))
    assert second[0] == "LaunchError" and "running already" in second[1]
    assert closed[0] == "LaunchError" and "was closed" in closed[1]
    assert loss == pytest.approx(OneProcess(make_net()).train_step([batch(0, 4)], F.cross_entropy), abs=1e-9)


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("optimizer", "ValueError", "Invalid learning rate: -1.0"),
        ("values", "ConfigError", "rank 0: values has shape (1,) for 'a.weight'"),
        ("check", "LaunchError", "rank 1: it is wrong"),
        ("execution", "ValueError", "no such stream"),
    ],
)
def test_a_launch_that_fails_leaves_nothing(pool: Pool, where: str, kind: str, text: str) -> None:
    """No process group, no thread, nothing that the next launch would take for a running program."""
    found = same_on_all(pool.run(JOBS + "fails_and_launches_again", ranks=2, where=where))
    assert found["error"][0] == kind and text in found["error"][1], found["error"]
    assert found["left"] == (0, 0)
    assert found["loss"] == pytest.approx(OneProcess(make_net()).train_step([batch(0, 4)], F.cross_entropy), abs=1e-9)


def test_bad_inputs_are_errors_on_all_ranks(pool: Pool) -> None:
    found = same_on_all(pool.run(JOBS + "bad_inputs", ranks=4))
    wanted = {
        "nan": "rank 3, input 'x': 1 of 54 numbers are NaN or Inf",
        "small": "the pp and tp ranks of dp 0 were given batches of different sizes",
        "targets": "a target of shape (5,) does not have the batch of 9 samples at dim 0",
        "count": "2 input tensors were given, the program takes 1",
        "dims": "input 'x' has shape (6,), 1 dims instead of 2",
        "signature": "the program was compiled for float64[N, 6], not for float64[N, 4]",
        "eval": "NaN or Inf",
    }
    for what, text in wanted.items():
        assert found[what][0] == "ConfigError", what
        assert text in found[what][1]
    assert found["after"] == found["after"]


def test_world_that_does_not_divide(pool: Pool) -> None:
    kind, text = same_on_all(pool.run(JOBS + "wrong_world", ranks=3))
    assert kind == "ConfigError"
    assert "pp * tp = 1 * 2 = 2 does not divide the 3 ranks" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_asked_for_and_absent(pool: Pool) -> None:
    kind, text = same_on_all(pool.run(JOBS + "no_cuda", ranks=2))
    assert kind == "LaunchError"
    assert "device cuda:0 was asked for, but this process sees 0 CUDA devices" in text


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="device='gpu' is not a device"):
        launch(compile_by_hand(make_net()), device="gpu")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), "optimizer is a SGD, not a factory"),
        (lambda params: None, "optimizer= gave a NoneType, not an optimizer"),
        (torch.optim.LBFGS, "optimizer= gave a LBFGS, not an optimizer whose step"),
    ],
)
def test_what_is_no_factory_of_optimizers_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        launch(compile_by_hand(make_net()), optimizer=optimizer)
    assert "lambda params: torch.optim.AdamW" in str(refused.value)


def test_unseeded_ranks_start_from_rank_0(pool: Pool) -> None:
    for notices, state in pool.run(JOBS + "different_weights", ranks=4):
        assert notices == ["the ranks held different weights; all start from those of rank 0"]
        assert_same(state, make_net(seed=0).state_dict(), 0)


@pytest.mark.parametrize(
    ("save_how", "load_how"),
    [({"dp": "fsdp2"}, {"tp": 2, "pp": 2}), ({"tp": 2, "pp": 2}, {"dp": "fsdp2", "pp": 2}), ({"tp": 2}, {"dp": "ddp"})],
)
def test_state_moves_between_topologies(pool: Pool, save_how: dict[str, Any], load_how: dict[str, Any]) -> None:
    for state, loaded in pool.run(JOBS + "state_round_trip", ranks=4, save_how=save_how, load_how=load_how):
        assert list(state) == list(loaded)
        assert sorted(state) == sorted(make_net().state_dict())
        assert_same(loaded, state, 0)


def test_states_that_do_not_fit(pool: Pool) -> None:
    found = same_on_all(pool.run(JOBS + "bad_states", ranks=2))
    assert all(kind == "CheckpointError" for kind, _ in found.values())
    assert "missing keys ['d.bias'], unexpected keys []" in found["missing"][1]
    assert "unexpected keys ['zzz']" in found["unexpected"][1]
    assert "'a.bias' has shape (6,) there and (7,) in the network" in found["shape"][1]


def test_gradients_that_are_not_finite(pool: Pool) -> None:
    (kind, text), unchanged = same_on_all(pool.run(JOBS + "exploding", ranks=4))
    assert kind == "LaunchError"
    assert "(stage 0)" in text and "hold NaN or Inf" in text
    assert unchanged


def test_a24_compile_a_model_that_has_run_and_average_it(pool: Pool) -> None:
    one = OneProcess(mlp(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), reset=reset)
    ema = {name: value.clone() for name, value in one.model.state_dict().items()}
    for i in range(3):
        one.train_step([(det(5, 4, k=0.5 + 0.1 * i), torch.tensor([0, 1, 2, 0, 1]))], F.cross_entropy)
        ema = {name: 0.9 * value + 0.1 * one.model.state_dict()[name] for name, value in ema.items()}
    for found, state, untouched in pool.run(JOBS + "ema_of_a_run_model", ranks=4):
        assert_same(found, ema)
        assert_same(state, one.model.state_dict())
        assert untouched


def test_other_signatures_are_compiled_when_they_come(pool: Pool) -> None:
    one = OneProcess(fill(Moody()), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_dim=1)
    y = torch.tensor([0, 1, 2, 0])
    losses = [one.train_step([(det(t, 4, 4), y)], F.cross_entropy) for t in (3, 5, 3, 5)]
    outputs = [one.evaluate(det(t, 4, 4)) for t in (3, 5)]
    for result in pool.run(JOBS + "other_signatures", ranks=4):
        assert result["losses"] == pytest.approx(losses, abs=1e-9)
        for made, wanted in zip(result["outputs"], outputs, strict=True):
            torch.testing.assert_close(made, wanted, rtol=0, atol=1e-9)
        assert len(result["notices"]) == 3


@pytest.mark.parametrize(("tp", "microbatches"), [(2, 1), (1, 2)])
def test_a_plan_for_far_fewer_samples_is_said_to_be_one(pool: Pool, tp: int, microbatches: int) -> None:
    """Once, when more than eight times as many come."""
    for found in pool.run(JOBS + "far_more_samples", ranks=2, tp=tp, microbatches=microbatches):
        assert found[:2] == [(), ()] and found[2] == found[3] == found[4]
        (notice,) = found[2]
        assert f"made for {4 // microbatches} samples at a time" in notice and "example_inputs=" in notice


@pytest.mark.parametrize("samples", [0, 4, 64])
def test_a_given_plan_is_compared_with_what_it_was_made_for(pool: Pool, samples: int) -> None:
    """Not with the example beside it; a plan that does not say gives no notice."""
    how: dict[str, Any] = {"tp": 2, "example_inputs": det(4, 4), "verify": "off"}
    plan = replace(parallelize(fill(Larger()), **how).plan, samples=samples)
    assert parallelize(fill(Larger()), plan=plan, **how).plan.samples == samples
    for found in pool.run(JOBS + "far_more_samples", ranks=2, tp=2, microbatches=1, example=2, plan=plan):
        assert len(found[-1]) == (samples == 4)


def test_a_batch_size_at_which_a_comparison_comes_out_otherwise(pool: Pool, tmp_path: Path) -> None:
    """A microbatch of one sample is compiled once; each loss and output is the module's own."""
    one = OneProcess(fill(Larger()), microbatches=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), reset=reset)
    y = torch.arange(8) % 3
    losses = [one.train_step([(det(n, 4), y[:n])], F.cross_entropy) for n in (8, 3, 2, 8)]
    with torch.no_grad():
        outputs = [torch.cat([one.model(part) for part in det(n, 4).tensor_split(min(n, 2))]) for n in (1, 3, 4)]
    for result in pool.run(JOBS + "compared_batch_sizes", ranks=2, folder=str(tmp_path)):
        assert result["losses"] == pytest.approx(losses, abs=1e-9)
        for made, wanted in zip(result["outputs"], outputs, strict=True):
            torch.testing.assert_close(made, wanted, rtol=0, atol=1e-9)
        again = [notice for notice in result["notices"] if "a batch of 1" in notice]
        assert len(again) == 1 and "compares N > 1" in again[0] and "jobs_launch.py" in again[0]
        kind, text = result["refusal"]
        assert kind == "ConfigError" and "a batch of 1" in text and "compares N > 1" in text


@pytest.mark.parametrize("dp", ["ddp", "fsdp2"])
def test_losses_that_use_other_outputs(pool: Pool, dp: str) -> None:
    """Parameters that a later loss reaches are averaged; under DDP one that reaches fewer is refused by name."""
    one = OneProcess(fill(Aux()), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), reset=reset)
    losses = []
    for i, loss in enumerate((first_answer, both_answers, both_answers)):
        x, y = det(8, 4, k=0.3 + 0.1 * i), torch.arange(8) % 3
        losses.append(one.train_step([(x[:4], y[:4]), (x[4:], y[4:])], loss))
    for found, state, (kind, text) in pool.run(JOBS + "changing_losses", ranks=2, dp=dp):
        assert found == pytest.approx(losses, abs=1e-9)
        assert_same(state, one.model.state_dict())
        if dp == "ddp":
            assert kind == "LaunchError" and "does not reach every parameter" in text
        else:
            assert kind == ""


def test_evaluation_of_fewer_samples_than_microbatches(pool: Pool) -> None:
    one = OneProcess(make_net())
    for outputs in pool.run(JOBS + "eval_of_small_batches", ranks=2):
        for size, made in zip((1, 2, 5), outputs, strict=True):
            torch.testing.assert_close(made, one.evaluate(batch(0, size)[0]), rtol=0, atol=1e-12)


def test_modes_and_preserved(pool: Pool) -> None:
    for found in pool.run(JOBS + "modes", ranks=2):
        state, gradients = found["kept"]
        assert_same(state, found["start"], 0)
        assert gradients == {}
        assert_same(found["frozen"], found["start"], 0)
        assert len(found["gradients"]) == 11
        assert not torch.equal(found["moved"]["bn.running_mean"], found["start"]["bn.running_mean"])


def test_the_pool_reports_failures_and_survives(pool: Pool) -> None:
    with pytest.raises(JobFailed, match="rank 1 was asked to fail"):
        pool.run(JOBS + "fails_on", ranks=2, rank=1)
    with pytest.raises(JobFailed, match="did not come back"):
        pool.run(JOBS + "hangs", ranks=2, timeout=3.0)
    assert pool.run(JOBS + "answers", ranks=3) == [(0, 3), (1, 3), (2, 3)]
