"""Networks that fold-time leaves as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import ops
from tests.graphs import Wrap
from tests.passes.rewrite.fold_time.parity import check, fold, images, traced
from tools.zoo.unet import RecordedUNet


def names(graph: Any) -> list[str]:
    return [node.name for node in graph.graph.nodes]


def test_a_network_without_a_loop_stays() -> None:
    graph = traced(Wrap(lambda m, x: m.fc(x).relu(), fc=nn.Linear(4, 3)), torch.randn(2, 4))
    before = names(graph)
    assert names(fold(graph)) == before


def test_a_network_in_multi_step_mode_stays() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = nn.Sequential(nn.Linear(4, 4), neuron.LIFNode(step_mode="m"), nn.Linear(4, 4))
    graph = traced(net, torch.randn(3, 2, 4), in_dims=1, time_dims=0)
    assert names(fold(graph)) == names(graph)


def test_a_value_of_a_loops_first_step_that_is_read_after_it_keeps_the_loop_per_step() -> None:
    """And what a fold made of three steps is no copy of what it left of one."""
    torch.manual_seed(0)
    net, x = RecordedUNet(True, (3, 4)).double(), images(4, 3, 16, 16)
    net(x)  # its buffers take the shape of what comes
    graph = check(net, x)
    assert "which only its first step makes, is read outside" in graph.notes["fold-time"]
    assert "its steps differ in shape" in graph.notes["fold-time"]


def test_a_number_made_of_the_batch_size_that_changes_with_the_step() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            v, steps = torch.zeros(x.shape[0], 5, dtype=x.dtype), []
            for t in range(4):
                v = 0.5 * v + self.fc(x[:, t]) / x[:, : t + 1].numel()
                steps.append(self.out(v))
            return torch.stack(steps)

    torch.manual_seed(0)
    graph = traced(Means().double(), images(3, 4, 6))
    assert len({node.args[1:] for node in graph.graph.nodes if node.target is ops.affine}) >= 4
    check(Means().double(), images(3, 4, 6), fires=False)
