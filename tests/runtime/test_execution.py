"""Execution modes and precisions in one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart import parallelize
from snnpart.errors import ConfigError
from snnpart.lazy import LazyProgram
from snnpart.runtime.captures import KEPT
from snnpart.runtime.compiled import _Ear
from snnpart.runtime.execution import identity
from snnpart.runtime.feeds import Feed, kind_of
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch


def launched(**options: Any) -> RunningProgram:
    adamw = lambda params: torch.optim.AdamW(params, lr=0.01)
    return launch(compile_by_hand(make_net()), **{"optimizer": adamw, "execution": "cuda_graph", **options})


def test_unknown_modes_and_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="execution='graph' is not known") as refused:
        launched(execution="graph")
    assert "valid: auto, eager, compile, cuda_graph" in str(refused.value)
    with pytest.raises(ConfigError, match="precision='int8' is not known"):
        launched(precision="int8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_what_the_cpu_does_instead_is_said_once() -> None:
    with launched() as running:
        for number in range(6):
            running.train_step(*batch(number, 4), F.cross_entropy)
        assert running.notices == ["execution='cuda_graph' captures nothing on the CPU: its steps run uncaptured"]
    with launched(execution="auto") as running:
        assert running.notices == []


def test_without_an_optimizer_gradients_accumulate() -> None:
    with launched(optimizer=None) as running:
        x, y = batch(0, 4)
        running.train_step(x, y, F.cross_entropy)
        once = {name: grad.clone() for name, grad in running.gradients().items()}
        running.train_step(x, y, F.cross_entropy)
        assert all(torch.allclose(grad, 2 * once[name]) for name, grad in running.gradients().items() if name != "bn")


def test_losses_of_earlier_steps_stay() -> None:
    with launched() as running:
        losses = [running.train_step(*batch(number, 4), F.cross_entropy) for number in range(3)]
        values = [loss.item() for loss in losses]
        running.train_step(*batch(7, 4), F.cross_entropy)
        assert [loss.item() for loss in losses] == values and len(set(values)) == 3


def test_evaluations_are_those_of_eager_steps() -> None:
    outputs = []
    for execution in ("eager", "cuda_graph"):
        with launched(execution=execution) as running:
            running.train_step(*batch(0, 4), F.cross_entropy)
            found = [running.eval_step(*batch(number, size), F.cross_entropy) for number, size in ((1, 4), (2, 3))]
            outputs.append(found)
    for (out, loss), (want, want_loss) in zip(*outputs, strict=True):
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
        torch.testing.assert_close(loss, want_loss, rtol=0, atol=1e-12)


def test_inputs_of_an_evaluation_that_are_not_finite() -> None:
    with launched() as running, pytest.raises(ConfigError, match="the inputs of evaluation 1 hold NaN or Inf"):
        x, _ = batch(0, 4)
        running.eval_step(x * float("inf"))


def test_kinds_of_batches_are_bounded_and_that_is_said_once() -> None:
    with launched() as running:
        for size in range(4, 4 + KEPT + 5):
            running.train_step(*batch(0, size), F.cross_entropy)
        assert len([notice for notice in running.notices if "more than 8 kinds of batches" in notice]) == 1


def test_an_optimizer_that_is_loaded_is_made_ready_again() -> None:
    with launched() as running:
        running.train_step(*batch(0, 4), F.cross_entropy)
        assert running.optimizer is not None
        state = running.optimizer.state_dict()
        for group in state["param_groups"]:
            group["fused"], group["foreach"] = None, None
        running.optimizer.load_state_dict(state)
        assert all(group["fused"] for group in running.optimizer.param_groups)


def test_functions_of_the_same_code_over_the_same_objects_are_one() -> None:
    weight = torch.ones(3)

    def make(scale: Tensor) -> Any:
        return lambda out, y: (out * scale).sum()

    assert identity(make(weight)) == identity(make(weight))
    assert identity(make(weight)) != identity(make(torch.ones(3)))
    assert identity(F.cross_entropy) != identity(F.mse_loss)


def test_feeds_keep_structure_and_addresses() -> None:
    first = {"x": (torch.zeros(2, 3), 5), "y": torch.zeros(2, dtype=torch.int64)}
    feed = Feed(first, torch.device("cpu"))
    address = feed.data["x"][0].data_ptr()
    feed.fill({"x": (torch.ones(2, 3), 5), "y": torch.tensor([1, 2])})
    assert feed.data["x"][1] == 5 and feed.data["x"][0].data_ptr() == address
    assert feed.data["y"].tolist() == [1, 2] and bool((feed.data["x"][0] == 1).all())
    assert kind_of(first) == kind_of({"x": (torch.ones(2, 3), 5), "y": torch.ones(2, dtype=torch.int64)})
    assert kind_of(first) != kind_of({"x": (torch.ones(2, 3), 6), "y": torch.ones(2, dtype=torch.int64)})


@pytest.mark.all
def test_compiled_graphs_are_eager_ones() -> None:
    losses = []
    for execution in ("eager", "compile"):
        with launched(execution=execution) as running:
            losses.append([running.train_step(*batch(number, 4), F.cross_entropy).item() for number in range(2)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


@pytest.mark.all
def test_a_piece_that_torch_cannot_compile_runs_as_it_is_and_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compile_fx, "compile_fx", broken)
    torch.compiler.reset()
    losses = []
    for execution in ("eager", "compile"):
        with launched(execution=execution) as running:
            losses.append([running.train_step(*batch(number, 4), F.cross_entropy).item() for number in range(2)])
            notices = running.notices
    assert losses[0] == losses[1]
    assert [notice.partition("; ")[0] for notice in notices] == [
        "torch cannot compile pieces of the network, which run as they are"
    ]
    assert notices[0].endswith("RuntimeError: no compiler here")


def test_only_what_runs_uncompiled_is_heard_and_only_while_it_runs() -> None:
    log, heard = logging.getLogger("torch._dynamo.convert_frame"), list[str]()
    ear = _Ear(heard.append)
    with ear.open():
        log.warning("the profile is written")
        log.warning("torch._dynamo hit config.%s (%s)\n   function: f", "recompile_limit", 8)
        try:
            raise ValueError("first line\nsecond")
        except ValueError:
            log.warning("WON'T CONVERT f", exc_info=True)
    log.warning("WON'T CONVERT g", exc_info=ValueError("later"))
    assert heard == ["torch._dynamo hit config.recompile_limit (8)", "ValueError: first line"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"execution": "graph"}, ConfigError, "execution='graph' is not known"),
        ({"precision": "int8"}, ConfigError, "precision='int8' is not known"),
        ({"loss_reduction": "max"}, ConfigError, "loss_reduction='max' is not known"),
        ({"device": "tpu9"}, ConfigError, "device='tpu9' is not a device"),
        ({"clip_grad_norm": -1.0}, ConfigError, "clip_grad_norm=-1.0 is not a positive number"),
        ({"optimizer": 3}, ConfigError, "optimizer is a int, not a factory"),
        ({"exec": "eager"}, TypeError, "unexpected keyword argument 'exec'"),
    ],
)
def test_a_program_that_is_compiled_at_its_first_batch_checks_its_options_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    program = parallelize(make_net())
    with pytest.raises(error, match=message):
        program.launch(**options)
    assert isinstance(program.launch(execution="eager", precision="bf16", loss_reduction="merged"), LazyProgram)
