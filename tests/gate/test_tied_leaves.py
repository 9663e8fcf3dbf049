"""Neuron layers that share one learned parameter share it in the program, wherever it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from snnpart import artifact, simulate
from snnpart.costs import default_profile
from snnpart.gate import check_program, check_trace
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from snnpart.program import CompiledProgram
from snnpart.trace import trace

neuron = pytest.importorskip("spikingjelly.activation_based.neuron")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.one, self.two = neuron.ParametricLIFNode(), neuron.ParametricLIFNode()
        self.two.w = self.one.w

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.c(self.two(self.b(self.one(self.a(x) * 3)) * 3))
        return result


def compiled(net: nn.Module, x: Tensor, tp: int, pp: int) -> CompiledProgram:
    graph = trace(net, x, time_steps=3)
    check_trace(net, graph, x)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    profile = default_profile()
    plan = decide(graph, tp=tp, pp=pp, dp="ddp", microbatches=1, pinned=None, profile=profile)
    return lower(graph, plan, profile=profile)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_gradients_of_all_layers_are_added(tp: int, pp: int) -> None:
    net, x = Shared().double(), torch.randn(8, 4, dtype=torch.float64)
    report = check_program(net, compiled(net, x, tp, pp), x)
    assert report.program is not None and report.program.gradient < 1e-12
    assert report.unverified == {}


def test_a_saved_program_keeps_the_tie(tmp_path: Path) -> None:
    net, x = Shared().double(), torch.randn(8, 4, dtype=torch.float64)
    program = compiled(net, x, 1, 1)
    artifact.save(program, tmp_path / "program")
    runs = [simulate.run(p, [x], training=True) for p in (program, artifact.load(tmp_path / "program"))]
    for run in runs:
        run.outputs[0].square().sum().backward()
    want, got = (run.gradients()["one.w"] for run in runs)
    assert want is not None and got is not None and torch.equal(want, got)
