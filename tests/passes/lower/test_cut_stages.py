"""One graph per stage: what crosses, in which order, once."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts
from snnpart.errors import PlanError
from snnpart.facts import Stage
from snnpart.graph import output_node
from snnpart.passes.lower.cut_stages import cut_stages
from snnpart.plan import Plan
from tests.lowering import analysed, assert_parity, compiled, fire, make

Pair = namedtuple("Pair", "a b")


def _pinned(module: nn.Module, *inputs: Tensor, **stages: int):  # type: ignore[no-untyped-def]
    pp = max(stages.values()) + 1
    return compiled(module.double(), inputs, pp=pp, pinned=Plan(pp=pp, stages=stages))


def test_a_value_with_two_readers_is_one_port() -> None:
    module, inputs, _ = make("skip")
    program = _pinned(module, *inputs, a=0, b=1, c=1, d=1, head=1)
    assert len(program.stage(0, 0).sends) == 1
    assert [p.name for p in program.stage(0, 0).sends] == [p.name for p in program.stage(1, 0).receives]


def test_ports_state_shape_type_and_gradient() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return torch.where(y > 0, self.b(y), y.argmax(1, keepdim=True).to(y))

    x = torch.randn(3, 4, dtype=torch.float64)
    program = _pinned(Mixed(), x, a=0, b=1)
    linear, larger, most = (port.value for port in program.stage(0, 0).sends)
    assert [value.dtype for value in (linear, larger, most)] == [torch.float64, torch.bool, torch.float64]
    assert [value.requires_grad for value in (linear, larger, most)] == [True, False, False]
    assert larger.shape == (3, 6) and larger.slopes == (1, 0)


def test_inputs_are_read_where_they_are_used_not_sent() -> None:
    module, inputs, _ = make("two")
    program = _pinned(module, *inputs, left=0, right=1, head=1, unused=0)
    assert program.stage(0, 0).reads == ("x",) and program.stage(1, 0).reads == ("y",)
    assert_parity(module, inputs, program)


def test_sizes_are_copied_into_each_stage() -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            zeros = torch.zeros(x.shape[0], 5, dtype=x.dtype)
            return self.b(fire(self.a(x) + zeros)) + zeros

    x = torch.randn(3, 4, dtype=torch.float64)
    program = _pinned(Zeros(), x, a=0, b=1)
    for stage in range(2):
        names = [n.target for n in program.stage(stage, 0).graph.nodes if n.op == "placeholder"]
        assert names[-1] == "batch_size"
    assert len(program.stage(0, 0).sends) == 1


def test_a_parameter_that_is_also_an_output_is_sent_on() -> None:
    class Exposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(fire(self.a(x))), self.a.weight * x.new_ones(1)

    module, x = Exposed().double(), torch.randn(4, 4, dtype=torch.float64)
    program = _pinned(module, x, a=0, b=1)
    assert {t.name for t in program.stage(1, 0).tensors} == {"b.weight", "b.bias"}
    assert len(program.stage(0, 0).sends) == 2


def test_a_stage_before_its_input_is_refused() -> None:
    module, inputs, _ = make("skip")
    graph = analysed(module, inputs)
    linears = [node for node in graph.graph.nodes if node.target is nn.functional.linear]
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            facts.put(node, Stage(1 if node is linears[0] else 0))
    with pytest.raises(PlanError, match=r"runs in stage 0 but needs node %linear .* of stage 1"):
        cut_stages(graph.graph, 2)


def test_the_last_stage_returns_the_outputs_in_order() -> None:
    module, inputs, _ = make("two")
    program = _pinned(module, *inputs, left=0, right=1, head=1, unused=1)
    assert len(output_node(program.stage(1, 0).graph).args[0]) == 2  # type: ignore[arg-type]
    assert program.stage(1, 0).sends == ()
