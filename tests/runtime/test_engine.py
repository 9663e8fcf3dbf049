"""Where a rank is while it waits: each wait of a step is an operation that the heartbeat knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from snnpart.runtime.heartbeat import DEVICE, WAITS
from snnpart.runtime.launch import launch
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.running import RunningProgram
from snnpart.runtime.update import Update
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch


class Number:
    """A number on a device, which is there when it is asked for: notes the operation of that moment."""

    def __init__(self, running: RunningProgram) -> None:
        self.running, self.during = running, ""

    def __float__(self) -> float:
        self.during = self.running._engine.heartbeat._operation
        return 0.0

    def __mul__(self, factor: float) -> Number:
        return self

    def __add__(self, other: Number) -> Number:
        return self


def test_the_host_waits_for_numbers_of_the_device_in_an_operation() -> None:
    with launch(compile_by_hand(make_net()), optimizer=lambda p: torch.optim.Adagrad(p), clip_grad_norm=1.0) as running:
        loss, loss_of_evaluation, report = (Number(running) for _ in range(3))
        running._engine.same_everywhere(loss)  # type: ignore[arg-type]
        running.eval_step(*batch(0, 4), lambda out, target: loss_of_evaluation)  # type: ignore[arg-type, return-value]
        assert running._execution.update.kind == "host"
        running._execution.update.finish([report] * 4)  # type: ignore[arg-type]
    assert all(x.during.startswith(DEVICE) for x in (loss, loss_of_evaluation, report))


def test_closing_waits_for_the_device_in_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's kernels of a rank that failed never end."""
    running, seen = launch(compile_by_hand(make_net())), []
    monkeypatch.setattr(running._execution.captures, "stream", "a stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: seen.append(running._engine.heartbeat._operation))
    running.close()
    assert [operation.startswith(DEVICE) for operation in seen] == [True]


@pytest.mark.parametrize("execution", ["eager", "cuda_graph"])
def test_ranks_agree_in_operations_that_wait_for_others(execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then is a rank woken, and not blamed. The first step also judges the kind of loss."""
    seen: list[tuple[str, str]] = []

    def spied(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def spy(*arguments: Any, **options: Any) -> Any:
            seen.append((name, running._engine.heartbeat._operation))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, spy)

    options: dict[str, Any] = {"execution": execution, "clip_grad_norm": 1.0, "precision": "fp16"}
    program = compile_by_hand(make_net(), microbatches=2)
    with launch(program, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options) as running:
        for owner, name in ((Ranks, "sum"), (Ranks, "gather"), (Update, "report")):
            spied(owner, name)
        running.train_step(*batch(0, 4), F.cross_entropy)
        running.eval_step(*batch(0, 4), F.cross_entropy)
    assert {name for name, _ in seen} == {"sum", "gather", "report"}
    assert [pair for pair in seen if not pair[1].startswith(WAITS)] == []
    assert any("kind of loss" in operation for _, operation in seen)
