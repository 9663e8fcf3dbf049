"""analyze-repeats: equal modules are found, unequal ones are not, and it takes linear time."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts
from snnpart.facts import Block
from snnpart.graph import SpikeGraph
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.trace import trace
from tests.neurons import Spike
from tests.zoo_spikingjelly import sew_resnet


class Unit(nn.Module):
    """A residual block; `width` is its inner width, `scale` a literal in its graph."""

    def __init__(self, width: int = 8, scale: float = 0.5) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, width), nn.Linear(width, 6), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.b(Spike.apply(self.a(x)))


def blocks(graph: SpikeGraph) -> dict[tuple[str, int], list[str]]:
    PassManager([*REWRITE, *ANALYZE]).run(graph)
    found: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for node in graph.graph.nodes:
        block = facts.get(node, Block)
        if block is not None:
            assert block.position == len(found[block.name, block.index])
            found[block.name, block.index].append(facts.origin(node).module)
    return dict(found)


def test_equal_blocks_are_occurrences_of_one() -> None:
    found = blocks(trace(nn.Sequential(Unit(), Unit(), Unit()), (torch.rand(2, 6),)))
    assert list(found) == [("0", 0), ("0", 1), ("0", 2)]
    assert len({len(nodes) for nodes in found.values()}) == 1
    assert {path.split(".")[0] for path in found["0", 2]} == {"2"}


@pytest.mark.parametrize("other", [Unit(width=7), Unit(scale=0.25)])
def test_another_width_or_literal_is_another_block(other: Unit) -> None:
    assert list(blocks(trace(nn.Sequential(Unit(), other, Unit()), (torch.rand(2, 6),)))) == [("0", 0), ("0", 1)]


def test_the_outermost_repetition_counts() -> None:
    stage = [nn.Sequential(Unit(), Unit()) for _ in range(2)]
    assert list(blocks(trace(nn.Sequential(*stage), (torch.rand(2, 6),)))) == [("0", 0), ("0", 1)]


def test_single_layers_are_no_blocks() -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    assert blocks(trace(layers, (torch.rand(2, 6),))) == {}


def test_a_residual_network_repeats_within_its_layers() -> None:
    pytest.importorskip("spikingjelly")
    graph = trace(sew_resnet(34)("m"), (torch.rand(2, 1, 3, 32, 32),), in_dims=1, time_dims=0)
    found = blocks(graph)
    counts = {name: sum(1 for key in found if key[0] == name) for name, _ in found}
    assert counts == {"layer1.0": 3, "layer2.1": 3, "layer3.1": 5, "layer4.1": 2}


class Loop(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layers, self.steps = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), steps

    def forward(self, x: Tensor) -> Tensor:
        state, out = [torch.zeros(()) for _ in self.layers], []
        for _ in range(self.steps):
            z = x
            for k, layer in enumerate(self.layers):
                state[k] = 0.9 * state[k] + layer(z)
                z = Spike.apply(state[k] - 1)
                state[k] = state[k] * (1 - z.detach())
            out.append(z)
        return torch.stack(out)


def test_all_analyses_take_linear_time() -> None:
    """Twice the steps take about twice the time; a loop of T=100 stays under 1.5 s."""
    seconds = {}
    for steps in (50, 100):
        graph = trace(Loop(steps), (torch.rand(2, 6),))
        start = time.process_time()
        PassManager([*REWRITE, *ANALYZE], verify=False).run(graph)
        seconds[steps] = time.process_time() - start
    assert seconds[100] < 1.5
    assert seconds[100] < 3.5 * max(seconds[50], 0.02)
