"""Loops on tp ranks: by channels where every operation inside stays in its channel, whole where one does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, simulate
from snnpart.costs import default_profile
from snnpart.facts import Placement, Sharded
from snnpart.gate import check_program
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.passes.decide import decide
from snnpart.passes.decide.lanes import find_lanes
from snnpart.passes.lower import lower
from snnpart.trace import trace
from tests.neurons import spike
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, images


def _analysed(module: nn.Module, x: Tensor, **dims: Any) -> SpikeGraph:
    graph = trace(module, x, **dims)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    return graph


def _loops(graph: SpikeGraph) -> list[Any]:
    return [node for node in graph.graph.nodes if isinstance(node.target, Loop)]


class Mixing(nn.Module):
    """A neuron whose threshold depends on all channels, one that is given sizes, and one that draws noise."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        v, out = None, []
        for _ in range(4):
            current = self.a(x)
            v = current if v is None else 0.5 * v + current
            v = v + 0.2 * torch.rand_like(v) if self.how == "noise" else v
            s = spike(v - 0.3 - 0.1 * v.mean(1, keepdim=True)) if self.how == "mean" else spike(v - 0.3)
            if self.how == "reshape":
                v = (v - 0.3 * s).reshape(-1, 4, 2).reshape(-1, 8)
            else:
                v = v - 0.3 * s
            out.append(self.b(s))
        return torch.stack(out)


def _programs(module: nn.Module, x: Tensor, tp: int, pp: int = 1, **dims: Any) -> Any:
    graph = _analysed(module, x, **dims)
    plan = decide(graph, tp=tp, pp=pp, dp="ddp", microbatches=1, pinned=None, profile=default_profile())
    compiled = lower(graph, plan, profile=default_profile())
    simulate.dry_run(compiled)
    return compiled


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ["residual", "snntorch", "norse"])
def test_loops_are_shared_by_channels(name: str, tp: int, pp: int) -> None:
    if name != "residual":
        pytest.importorskip(name)
    torch.manual_seed(3)
    net, x = {
        "residual": lambda: (nets.Residual(4), images(2, 2, 5, 5)),
        "snntorch": lambda: (nets.ConvLoop(4), images(2, 1, 10, 10)),
        "norse": lambda: (nets.NorseLoop(4), images(2, 1, 6, 6)),
    }[name]()  # type: ignore[no-untyped-call]
    net = active(net)
    compiled = _programs(net, x, tp, pp)
    placed = [facts.need(node, Placement).output for node in _loops(compiled.source)]
    assert any(isinstance(spread, Sharded) and spread.dim == 2 for spread in placed)
    report = check_program(net, compiled, x)
    assert report.program is not None and report.program.gradient < 1e-9


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("mean", "inside it needs an operand otherwise|the sharded dim"),
        ("reshape", "a number of channels|sharded dim"),
        ("noise", "inside it draws random numbers for all channels at every step"),
    ],
)
def test_loops_that_mix_channels_stay_whole(how: str, why: str) -> None:
    torch.manual_seed(0)
    net, x = active(Mixing(how)), images(3, 6)
    graph = _analysed(net, x)
    (loop,) = _loops(graph)
    lanes = find_lanes(graph, 2)
    assert loop not in lanes.rows
    assert re.search(why, lanes.reasons[loop]), lanes.reasons[loop]
    check_program(net, _programs(net, x, 2), x)


def test_recurrent_weights_inside_a_loop_stay_whole() -> None:
    torch.manual_seed(0)
    shape = nets.Shape(layers=(nets.Layer(feedback=True),), source="batch-first", steps=4)
    net = active(nets.RandomLoop(shape))
    x = net.input()
    compiled = _programs(net, x, 2, **net.dims())
    check_program(net, compiled, x)
