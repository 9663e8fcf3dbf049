"""The number of microbatches, and BatchNorm over the whole batch."""

from __future__ import annotations

import pytest
import torch

from snnpart.api import parallelize
from snnpart.errors import ConfigError, PlanError
from snnpart.program import CompiledProgram
from tests.distributed.cases import Norms, Skip, det, fill, reset


def compiled(model: torch.nn.Module, x: torch.Tensor, **options: object) -> CompiledProgram:
    return parallelize(model, example_inputs=x, verify="off", reset=reset, **options).compiled  # type: ignore[arg-type]


def images() -> torch.Tensor:
    return det(8, 2, 5, 5)


def test_default_is_the_number_of_stages() -> None:
    assert compiled(fill(Skip()), det(4, 4), pp=3).plan.microbatches == 3


def test_few_microbatches_go_as_gpipe_unless_the_schedule_is_fixed() -> None:
    program = compiled(fill(Skip()), det(4, 4), pp=3, microbatches=2)
    assert (program.plan.schedule, program.plan.microbatches) == ("gpipe", 2)
    assert any(n.startswith("schedule='gpipe': 1F1B fills its 3 stages") for n in program.notices)
    with pytest.raises(PlanError, match="schedule='1f1b' over pp=3 ranks fills its 3 stages"):
        compiled(fill(Skip()), det(4, 4), pp=3, microbatches=2, schedule="1f1b")
    with pytest.raises(PlanError, match="give microbatches=6, or take a schedule that can") as refused:
        compiled(fill(Skip()), det(4, 4), pp=2, microbatches=5, schedule="interleaved-1f1b")
    assert str(refused.value).endswith("valid: gpipe, 1f1b, zbv")


def test_a_number_that_was_left_open_moves_to_the_schedule() -> None:
    assert compiled(fill(Skip()), det(4, 4), pp=3, schedule="1f1b").plan.microbatches == 3
    assert compiled(fill(Skip()), det(4, 4), pp=2, schedule="zbv").plan.microbatches == 2
    with pytest.raises(ConfigError, match="schedule='zb' is not known"):
        compiled(fill(Skip()), det(4, 4), pp=2, schedule="zb")


def test_full_batch_statistics_run_as_one_microbatch() -> None:
    program = compiled(fill(Norms()), images(), pp=2, schedule="gpipe", batchnorm="full")
    assert program.plan.microbatches == 1
    assert any("runs as one microbatch" in notice for notice in program.notices)
    assert compiled(fill(Norms()), images(), batchnorm="full").plan.microbatches == 1


def test_without_batch_norm_it_changes_nothing() -> None:
    program = compiled(fill(Skip()), det(4, 4), pp=2, batchnorm="full", microbatches=4)
    assert program.plan.microbatches == 4


class Rate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.l(x)
        return y, (y > 0).to(y.dtype).mean()


def test_an_output_without_a_batch_dim_is_noted_where_batches_are_cut() -> None:
    (notice,) = compiled(fill(Rate()), det(4, 4), microbatches=2).notices
    assert "'output.1' has no batch dim: over 2 microbatches it is the mean" in notice
    assert not compiled(fill(Rate()), det(4, 4)).notices


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"needs the whole batch at each BatchNorm, schedule=\'zbv\'"):
        compiled(fill(Norms()), images(), pp=2, schedule="zbv", batchnorm="full")
    with pytest.raises(PlanError, match="as one microbatch, not as 4"):
        compiled(fill(Norms()), images(), pp=2, schedule="gpipe", batchnorm="full", microbatches=4)
    with pytest.raises(ConfigError, match="batchnorm='group' is not known"):
        compiled(fill(Norms()), images(), batchnorm="group")
