"""Stages that begin where the user says, and the reasons for which they cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.errors import ConfigError, PlanError
from tests.distributed.cases import LIF, Skip, fill, reset


class Tied(nn.Module):
    """The third layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(self.b(self.a(x)).relu()))
        return out


class Recurrent(nn.Module):
    """A layer whose output of step t comes back at step t + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.back, self.n, self.h = nn.Linear(4, 4), nn.Linear(4, 4), LIF(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        z, out = torch.zeros_like(x[0]), []
        for step in x:
            z = self.n(self.a(step + self.back(z)))
            out.append(self.h(z))
        return torch.stack(out)


def stages(model: nn.Module, x: Tensor, **options: object) -> dict[str, int]:
    return parallelize(model, example_inputs=x, verify="off", reset=reset, **options).plan.stages  # type: ignore[arg-type]


def test_stages_begin_there() -> None:
    x = torch.randn(3, 4).double()
    found = stages(fill(Skip()), x, pp=3, split_at=["b", "h"])
    assert {name: found[name] for name in "abcdh"} == {"a": 0, "b": 1, "c": 1, "d": 1, "h": 2}


def test_a_stage_begins_with_the_first_operation_of_its_module() -> None:
    """Also where that one has no parameters; compiling with the plan that was found gives the same stages."""
    block = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Linear(4, 4))
    net, x = nn.Sequential(nn.Linear(4, 4), block), torch.randn(3, 4)
    program = parallelize(net, example_inputs=x, verify="off", pp=2, split_at=["1"])
    again = parallelize(net, example_inputs=x, verify="off", plan=program.plan)
    for compiled in (program.compiled, again.compiled):
        names = [[node.target for node in compiled.stage(i, 0).graph.nodes] for i in range(2)]
        assert [targets.count(torch.tanh) for targets in names] == [0, 2]


def test_interleaved_stages_begin_there() -> None:
    x = torch.randn(3, 4).double()
    found = stages(fill(Skip()), x, pp=2, schedule="zbv", split_at=["b", "c", "d"])
    assert {name: found[name] for name in "abcdh"} == {"a": 0, "b": 1, "c": 2, "d": 3, "h": 3}


@pytest.mark.parametrize(
    ("split_at", "text"),
    [
        (["b"], "names 1 modules, which makes 2 stages instead of 3"),
        (["b", "zzz"], "'zzz': split_at names it, but no tensor or neuron layer that the network uses lies there"),
        (["c", "b"], "'b': no stage can begin there: it does not come after the start of the stage before"),
        (["a", "b"], "'a': no stage can begin there: it is where the network begins"),
    ],
)
def test_refusals(split_at: list[str], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        stages(fill(Skip()), torch.randn(3, 4).double(), pp=3, split_at=split_at)


def test_what_cannot_be_cut_apart() -> None:
    with pytest.raises(PlanError, match="'a': no stage can begin there: it cannot be cut from 'back"):
        stages(fill(Recurrent()), torch.randn(5, 3, 4).double(), pp=2, split_at=["a"], in_dims=1)


def test_both_stages_hold_a_copy_of_what_is_tied() -> None:
    found = stages(Tied(), torch.randn(3, 4), pp=2, split_at=["c"])
    assert {name: found[name] for name in ("a", "b", "c", "d")} == {"a": 0, "b": 0, "c": 1, "d": 1}
    found = stages(Tied(), torch.randn(3, 4), pp=2, split_at=["d"])
    assert {name: found[name] for name in ("a", "b", "c", "d")} == {"a": 0, "b": 0, "c": 0, "d": 1}


def test_text_and_plan() -> None:
    with pytest.raises(ConfigError, match="is one text"):
        stages(fill(Skip()), torch.randn(3, 4).double(), pp=2, split_at="b")
    program = parallelize(fill(Skip()), pp=2, example_inputs=torch.randn(3, 4).double(), verify="off")
    with pytest.raises(ConfigError, match="and a plan, which has stages"):
        stages(fill(Skip()), torch.randn(3, 4).double(), pp=2, split_at=["b"], plan=program.plan)
