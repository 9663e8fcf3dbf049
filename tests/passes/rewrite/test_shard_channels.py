"""The rank's graph: which collectives stand where, and which numbers became local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import facts, ops, parallelize, simulate
from snnpart.facts import Cost, Value
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from tests.lowering import assert_parity, compiled, fire, make


def _collectives(program: CompiledProgram) -> list[str]:
    return [node.target.__name__ for node in _nodes(program) if node.target in ops.COLLECTIVES]  # type: ignore[union-attr]


def _nodes(program: CompiledProgram, rank: int = 0) -> list[fx.Node]:
    return list(program.stage(0, rank).graph.nodes)


def _chain(*rules: str) -> CompiledProgram:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    shards = {str(2 * i): rule for i, rule in enumerate(rules)}
    return compiled(module, (torch.randn(5, 4, dtype=torch.float64),), tp=2, pinned=Plan(tp=2, shards=shards))


@pytest.mark.parametrize(
    "rules, expected",
    [
        (("column", "row", "replicate"), ["all_reduce"]),
        (("replicate", "column", "row"), ["grad_all_reduce", "all_reduce"]),
        (
            ("column", "column", "column"),
            ["all_gather", "all_gather", "all_gather"],
        ),
        (("column", "scatter", "row"), ["reduce_scatter", "all_reduce"]),
        (("scatter", "scatter", "column"), ["shard", "reduce_scatter", "reduce_scatter", "all_gather", "all_gather"]),
        (("row", "row", "row"), ["shard", "all_reduce", "shard", "all_reduce", "shard", "all_reduce"]),
        (("replicate", "replicate", "replicate"), []),
    ],
)
def test_collectives_of_a_chain(rules: tuple[str, ...], expected: list[str]) -> None:
    assert _collectives(_chain(*rules)) == expected


def test_the_bias_of_a_row_sharded_layer_is_added_once_after_the_sum() -> None:
    nodes = _nodes(_chain("column", "row", "replicate"))
    total = next(node for node in nodes if node.target is ops.all_reduce)
    part, (added,) = total.args[0], total.users
    assert isinstance(part, fx.Node) and part.args[2] is None
    assert added.target is torch.add and added.args[1].target == "2.bias"  # type: ignore[union-attr]


def test_one_gradient_sum_serves_several_readers() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = fire(self.stem(x))
            return self.a(hidden) + self.b(hidden)

    module, inputs = Fork().double(), (torch.randn(5, 4, dtype=torch.float64),)
    pinned = Plan(tp=2, shards={"stem": "replicate", "a": "column", "b": "column"})
    program = compiled(module, inputs, tp=2, pinned=pinned)
    assert _collectives(program) == ["grad_all_reduce", "all_gather"]
    assert_parity(module, inputs, program)


def test_the_input_gradient_of_a_column_layer_is_summed() -> None:
    """Case A10: 33.346415820 on every rank; rank 0 alone would have 31.837880605."""

    def determined(*shape: int, k: float = 0.37, scale: float = 1.0) -> Tensor:
        count = torch.Size(shape).numel()
        return (torch.sin(torch.arange(count, dtype=torch.float64) * k + 0.1) * scale).reshape(shape)

    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1)).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(determined(*p.shape, scale=0.9))
    inputs = (determined(2, 2, 5, 5),)
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"0": "replicate", "2": "column"}))
    got = simulate.run(program, inputs, training=True)
    (got.outputs[0] * determined(*got.outputs[0].shape, k=0.11)).sum().backward()
    module(*inputs).mul(determined(2, 6, 5, 5, k=0.11)).sum().backward()
    one = got.ranks[0, 0].tensors["0.weight"].grad
    assert one is not None and torch.allclose(one, module[0].weight.grad, atol=1e-10)  # type: ignore[arg-type]
    assert torch.equal(one, got.ranks[0, 1].tensors["0.weight"].grad)  # type: ignore[arg-type]
    assert "grad_all_reduce" in _collectives(program)


def test_numbers_that_count_channels_are_local() -> None:
    class Shapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.depth = nn.Conv2d(1, 7, 3, padding=1), nn.Conv2d(7, 14, 3, padding=1, groups=7)

        def forward(self, x: Tensor) -> Tensor:
            y = self.depth(fire(self.conv(x)))
            y = y.reshape(x.shape[0], 14, 16).unflatten(1, (7, 2)).unsqueeze(1).expand(-1, 3, 7, 2, 16)
            return y.flatten(2) * 1.5

    module, inputs = Shapes().double(), (torch.randn(2, 1, 4, 4, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"conv": "column"}))
    for rank, channels in enumerate((4, 3)):
        by_target = {node.target: node for node in reversed(_nodes(program, rank))}
        assert by_target[torch.reshape].args[1][1] == 2 * channels  # type: ignore[index]
        assert by_target[torch.unflatten].args[2] == (channels, 2)
        depthwise = [node for node in _nodes(program, rank) if node.target is torch.conv2d][1]
        assert depthwise.args[6] == channels
    assert_parity(module, inputs, program)


def test_ranks_with_equal_shares_have_one_graph() -> None:
    module, inputs, options = make("residual")
    uneven = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"blocks.0.conv1": "column"}), **options)
    assert uneven.stage(0, 0).graph is not uneven.stage(0, 1).graph, "7 inner channels are uneven"
    chain = _chain("column", "row", "replicate")
    assert chain.stage(0, 0).graph is chain.stage(0, 1).graph


def test_facts_are_local() -> None:
    module, inputs, options = make("widths")
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"0": "column"}), **options)
    for rank, channels in enumerate((4, 3)):
        linear = next(node for node in _nodes(program, rank) if node.target is nn.functional.linear)
        assert facts.need(linear, Value).shape[-1] == channels
    whole = next(n for n in program.source.graph.nodes if n.target is nn.functional.linear)
    assert facts.need(linear, Cost).flops == facts.need(whole, Cost).flops / 2
    gather = next(node for node in _nodes(program) if node.target in ops.COLLECTIVES)
    assert facts.origin(gather).made_by == "shard-channels" and facts.need(gather, Cost).us > 0


class Border(nn.Module):
    """A norm whose running statistics make the border around its result, as large as the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        assert self.bn.running_mean is not None
        n, c, h, w = y.shape
        out = (self.bn.bias.detach() - self.bn.running_mean).view(1, -1, 1, 1).repeat(n, 1, h + 2, w + 2)
        out[:, :, 1:-1, 1:-1] = y
        return out


class Watched(nn.Module):
    """Running statistics that operations over all channels read before and after they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bn.running_mean is not None
        before = self.bn.running_mean.flip(0).norm()
        y = fire(self.bn(self.conv(x)))
        return self.head(y) * (1 + before) + self.bn.running_mean.flip(0).norm()


@pytest.mark.parametrize("net", [lambda: Border(5), Watched])
def test_running_statistics_that_others_read_too_are_written(net: Any) -> None:
    """A sharded norm that wrote its averages into a slice of a copy would lose them."""
    module = net().double().train()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    module(x)
    program = compiled(module, (x,), tp=2)
    held = {t.name: t for t in program.stages[0, 0].tensors}
    assert held["bn.running_mean"].dim == 0
    assert_parity(module, (x,), program)
    assert_parity(module, (x,), program, microbatches=2)


def test_a_border_made_of_statistics_is_cut_with_the_channels() -> None:
    module = Border(6).double()
    program = compiled(module, (torch.randn(4, 2, 5, 5, dtype=torch.float64),), tp=2)
    names = [node.target for node in program.stages[0, 0].graph.nodes if node.target in (ops.shard, ops.all_gather)]
    assert names == [ops.all_gather]


class Written(nn.Module):
    """Writes into a copy of its hidden layer, as `write` does."""

    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 6), nn.Linear(6, 4), write

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        self.write(h)
        return self.b(h)


def _through_a_mask(h: Tensor) -> None:
    h[h > 0.1] = 0.0


def _some_channels(h: Tensor) -> None:
    h[:, torch.tensor([0, 3])] = 1.0


def _some_samples(h: Tensor) -> None:
    h[torch.tensor([0, 1])] = 1.0


@pytest.mark.parametrize("write", [_through_a_mask, _some_channels, _some_samples])
def test_a_write_through_an_index_is_cut_only_where_the_channels_stay_whole(write: Callable[[Tensor], None]) -> None:
    model = Written(write).double()
    program = parallelize(model, tp=2, example_inputs=torch.randn(5, 4, dtype=torch.float64))
    assert program.plan.shards == {"a": "column", "b": "row"}
