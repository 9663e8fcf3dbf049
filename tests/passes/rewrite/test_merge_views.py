"""merge-views: one view for all that read it, and one gather behind it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from snnpart import ops
from snnpart.passes.analyze.kinds import kind_of
from snnpart.plan import Plan
from tests.lowering import analysed, assert_parity, compiled, fire


class Fork(nn.Module):
    """Two layers that each flatten [T, N] for themselves, and one that flattens otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(2, 7, 1), nn.Conv2d(7, 4, 1), nn.Conv2d(7, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = fire(self.stem(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
        return self.a(y.flatten(0, 1)) + self.b(y.flatten(0, 1)) + y.flatten(0, 2).mean()


def test_equal_views_become_one_and_are_gathered_once() -> None:
    module, inputs = Fork().double(), (torch.randn(3, 4, 2, 5, 5, dtype=torch.float64),)
    graph = analysed(module, inputs, in_dims=1, out_dims=0)
    convolutions = [node for node in graph.graph.nodes if node.target is torch.conv2d]
    assert convolutions[1].args[0] is convolutions[2].args[0]
    pinned = Plan(tp=2, shards={"stem": "column", "a": "column", "b": "column"})
    program = compiled(module, inputs, tp=2, pinned=pinned, in_dims=1, out_dims=0)
    gathers = [node for node in program.stage(0, 0).graph.nodes if node.target is ops.all_gather]
    assert len([node for node in gathers if node.users and any(kind_of(u) == "conv" for u in node.users)]) == 1
    assert_parity(module, inputs, program, in_dim=1)
