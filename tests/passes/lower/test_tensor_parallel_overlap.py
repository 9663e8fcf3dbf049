"""How much the graphs of tp ranks leave to compute beside a collective: docs/execution.md says it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

from snnpart import facts, ops, parallelize
from snnpart.facts import Origin
from snnpart.ops_later import WeightLater
from snnpart.passes.analyze.kinds import kind_of
from snnpart.vision import recipes

HEAVY = ("conv", "linear", "matmul")
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
    heavy = [node for node in graph.nodes if kind_of(node) in HEAVY]
    moving = [node for node in graph.nodes if node.target in MOVING]
    sources = {node: before(node) for node in heavy + moving}
    for sent in moving:
        yield [node for node in heavy if sent not in sources[node] and node not in sources[sent]]


@pytest.mark.parametrize(
    ("make", "size", "collectives", "alone", "put_off"),
    [
        (recipes.sew_resnet34, 32, 33, 30, 30),
        pytest.param(lambda: recipes.spikformer_s(image_size=32), 32, 29, 29, 22, marks=pytest.mark.all),
    ],
    ids=["sew_resnet34", "spikformer_s"],
)
def test_what_can_be_computed_beside_a_collective(
    make: object, size: int, collectives: int, alone: int, put_off: int
) -> None:
    """In forward a layer's gather or sum is what the next operation reads, but for the shortcuts of three blocks. In
    backward every gradient that is summed over the ranks has the gradient of a weight beside it."""
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
        assert "downsample" in facts.need(shortcut, Origin).module
    sums = [node for node in program.stage(0, 0).graph.nodes if sums_gradients(node)]
    assert len(sums) == put_off
    assert all(any(isinstance(user.target, WeightLater) for user in readers(node)) for node in sums)


def sums_gradients(node: fx.Node) -> bool:
    partial = node.target is ops.all_gather and ops.gather_options(node)[1]
    return partial or node.target is ops.grad_all_reduce


def readers(node: fx.Node) -> set[fx.Node]:
    """The operations that read a value, also through views."""
    found = set(node.users)
    return found.union(*(readers(user) for user in node.users if kind_of(user) in ("view", "elementwise")))
