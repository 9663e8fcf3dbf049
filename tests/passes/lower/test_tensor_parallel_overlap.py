"""How much the graphs of tp ranks leave to compute beside a collective: docs/execution.md says it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from snnpart import ops, parallelize
from snnpart.vision import recipes

HEAVY = {torch.conv1d, torch.conv2d, torch.nn.functional.linear, torch.matmul}
MOVING = {ops.all_gather, ops.all_reduce, ops.reduce_scatter}
"""Collectives that send in forward."""


def before(node: fx.Node) -> set[fx.Node]:
    """All that the node is computed from."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return found


def beside(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """For each collective the convolutions and matrix products that neither feed it nor wait for it."""
    sources = {node: before(node) for node in graph.nodes if node.target in HEAVY | MOVING}
    for sent in (node for node in sources if node.target in MOVING):
        others = (node for node in sources if node.target in HEAVY)
        yield [node for node in others if sent not in sources[node] and node not in sources[sent]]


@pytest.mark.parametrize(
    ("make", "size", "collectives", "alone"),
    [
        (recipes.sew_resnet34, 32, 33, 30),
        pytest.param(lambda: recipes.spikformer_s(image_size=32), 32, 29, 29, marks=pytest.mark.all),
    ],
    ids=["sew_resnet34", "spikformer_s"],
)
def test_what_can_be_computed_beside_a_collective(make: object, size: int, collectives: int, alone: int) -> None:
    """A layer's gather or sum is what the next operation reads; only the shortcuts of three blocks are beside one."""
    pytest.importorskip("spikingjelly")
    torch.manual_seed(0)
    model: nn.Module = make()  # type: ignore[operator]
    program = parallelize(
        model, example_inputs=torch.randn(2, 3, size, size), input_layout="NCHW", tp=2, verify="off"
    ).compiled
    found = list(beside(program.stage(0, 0).graph))
    assert len(found) == collectives
    assert sum(not nodes for nodes in found) == alone
    for (shortcut,) in (nodes for nodes in found if nodes):
        weight = shortcut.args[1]
        assert isinstance(weight, fx.Node) and "downsample" in str(weight.target)
