"""The simulation itself: collectives and their gradients, microbatches, what is gathered, and that it can fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import ops, simulate
from snnpart.errors import ConfigError, VerifyError
from snnpart.lockstep import collective, join
from snnpart.plan import Plan
from tests.lowering import compiled, make

PIECES = (((0, 2), (5, 6)), ((2, 5),))


def _node(function: object, *rest: object) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(function, (graph.placeholder("x"), "tp", *rest))  # type: ignore[arg-type]


def _ranks(*sizes: int) -> list[Tensor]:
    return [torch.randn(2, size, dtype=torch.float64, requires_grad=True) for size in sizes]


def _run(function: object, xs: list[Tensor], *rest: object) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Results, the cotangents that were given, and the gradients."""
    out = list(collective(_node(function, *rest), xs))
    given = [torch.randn_like(value) for value in out]
    grads = torch.autograd.grad(out, xs, given)
    return out, given, list(grads)


def test_all_reduce() -> None:
    xs = _ranks(6, 6)
    out, given, grads = _run(ops.all_reduce, xs)
    assert all(torch.equal(value, xs[0] + xs[1]) for value in out)
    assert all(torch.equal(a, b) for a, b in zip(given, grads))


def test_grad_all_reduce() -> None:
    xs = _ranks(6, 6)
    out, given, grads = _run(ops.grad_all_reduce, xs)
    assert all(torch.equal(a, b) for a, b in zip(out, xs))
    assert all(torch.equal(grad, given[0] + given[1]) for grad in grads)


def test_all_gather_and_shard_are_each_others_gradient() -> None:
    parts = _ranks(3, 3)
    whole, given, grads = _run(ops.all_gather, parts, 1, PIECES)
    assert torch.equal(whole[0], whole[1]) and torch.equal(ops.select_pieces(whole[0], 1, PIECES[0]), parts[0])
    assert torch.equal(grads[1], ops.select_pieces(given[1], 1, PIECES[1]))
    cut, given, grads = _run(ops.shard, _ranks(6, 6), 1, PIECES)
    assert cut[0].shape == (2, 3)
    assert all(torch.equal(grad, join(given, 1, PIECES)) for grad in grads)


def test_reduce_scatter() -> None:
    xs = _ranks(6, 6)
    out, given, grads = _run(ops.reduce_scatter, xs, 1, PIECES)
    assert torch.equal(out[1], ops.select_pieces(xs[0] + xs[1], 1, PIECES[1]))
    assert all(torch.equal(grad, join(given, 1, PIECES)) for grad in grads)


def test_a_missing_gradient_sum_is_found() -> None:
    """Case A10 as a bug: without the gradient all-reduce the ranks' gradients upstream differ, and that is an error."""
    module, inputs, options = make("residual")
    pinned = Plan(tp=2, shards={"stem": "replicate", "blocks.0.conv1": "column", "blocks.0.conv2": "row"})
    program = compiled(module, inputs, tp=2, pinned=pinned, **options)
    for rank in range(2):
        graph = program.stage(0, rank).graph
        for node in list(graph.nodes):
            if node.target is ops.grad_all_reduce:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
    got = simulate.run(program, inputs, training=True)
    got.outputs[0].square().sum().backward()
    with pytest.raises(VerifyError, match=r"tp rank 1 has another gradient of 'stem.*than tp rank 0"):
        got.gradients()


def test_gradients_that_are_zero_but_for_rounding_may_differ_in_it() -> None:
    """A bias in front of a BatchNorm: each rank's own sum leaves another rest."""
    module, inputs, options = make("residual")
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"": "replicate"}), **options)
    got = simulate.run(program, inputs, training=True)
    got.outputs[0].square().sum().backward()
    bias, name = got.ranks[0, 1].tensors["blocks.0.conv2.bias"], "blocks.0.conv2.bias"
    want = got.gradients()[name]
    assert bias.grad is not None and want is not None and 0 < want.abs().max() < 1e-12
    bias.grad.neg_()
    assert got.gradients()[name] is not None
    bias.grad += 1e-3
    with pytest.raises(VerifyError, match="tp rank 1 has another gradient of 'blocks.0.conv2.bias'"):
        got.gradients()


def test_too_small_a_batch_is_refused() -> None:
    module, inputs, options = make("residual")
    program = compiled(module, inputs, **options)
    with pytest.raises(ConfigError, match="a batch of 6 samples cannot be cut into 7 microbatches"):
        simulate.run(program, inputs, training=True, microbatches=7)


def test_given_values_are_copied() -> None:
    module, inputs, options = make("residual")
    program = compiled(module, inputs, tp=2, **options)
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in values.items()}
    simulate.run(program, inputs, values=values, training=True)
    assert all(torch.equal(values[name], before[name]) for name in values)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_dropout_is_the_same_on_every_rank() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    inputs = (torch.randn(5, 4, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2)
    torch.manual_seed(1)
    want = module(*inputs)
    torch.manual_seed(1)
    got = simulate.run(program, inputs, training=True)
    assert torch.allclose(want, got.outputs[0], atol=1e-12)
    got.outputs[0].sum().backward()
    assert got.gradients()["0.weight"] is not None


def test_a_buffer_that_is_assigned_keeps_its_old_values_for_readers() -> None:
    class Moving(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 3)
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.line(x) * self.mean
            self.mean = 0.5 * self.mean + y.detach().mean(0)
            return y

    module, inputs = Moving().double(), (torch.randn(4, 3, dtype=torch.float64),)
    program = compiled(module, inputs)
    got = simulate.run(program, inputs, training=True)
    got.outputs[0].sum().backward()
    module(*inputs).sum().backward()
    found = got.gradients()["line.weight"]
    assert found is not None and torch.allclose(found, module.line.weight.grad)  # type: ignore[arg-type]
    assert torch.allclose(got.buffers()["mean"], module.mean)


def test_outputs_without_a_batch_are_means_over_samples() -> None:
    class Rate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.line(x)
            return y, y.square().mean()

    module, inputs = Rate().double(), (torch.randn(5, 3, dtype=torch.float64),)
    got = simulate.run(compiled(module, inputs), inputs, training=True, microbatches=2)
    assert torch.allclose(got.outputs[1], module(*inputs)[1])


def test_another_plan_does_not_change_the_run() -> None:
    module, inputs, options = make("skip")
    outputs = [
        simulate.run(compiled(module, inputs, tp=tp, pp=pp, **options), inputs, training=True).outputs[0]
        for tp, pp in ((1, 1), (2, 1), (1, 4), (2, 3))
    ]
    assert all(torch.allclose(outputs[0], other, atol=1e-12) for other in outputs[1:])


def test_a_buffer_that_is_assigned_is_read_as_it_was_before() -> None:
    """Also where its channels are cut for a sharded layer, and where it is an output."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
            self.register_buffer("seen", torch.linspace(0, 1, 6, dtype=torch.float64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.first(x))
            before = self.seen
            out = self.second(hidden * (1 + self.seen))
            self.seen = self.seen + hidden.detach().sum(0)
            return out, before

    torch.manual_seed(0)
    module, inputs = Counting().double(), (torch.randn(4, 4, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2, pp=2, pinned=Plan(tp=2, pp=2, shards={"first": "column"}))
    run = simulate.run(program, inputs, training=True)
    for made, right in zip(run.outputs, module(*inputs), strict=True):
        assert torch.allclose(made, right)
    assert torch.allclose(run.buffers()["seen"], module.seen)
