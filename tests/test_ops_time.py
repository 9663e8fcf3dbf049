"""Loops and norms over time steps, and what verifier, text, effects and analyses say of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from snnpart import effects, facts, text
from snnpart.errors import ConfigError, LaunchError, VerifyError
from snnpart.facts import Cost, Domain, State, TimeRole, Value, Values
from snnpart.graph import Body
from snnpart.ops_time import (
    Loop,
    all_nodes,
    batch_norm_at_once,
    batch_norm_repeated,
    batch_norm_steps,
    leaf_paths,
)
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE
from snnpart.verify import verify
from tests.passes.rewrite.fold_time.nets import Residual
from tests.passes.rewrite.fold_time.parity import active, fold, images, traced


def _step(leaf: str = "") -> fx.Graph:
    """(x, w, v) -> (v', y): y = x * w + v, v' = y; with a leaf called on y."""
    graph = fx.Graph()
    x, w, v = (graph.placeholder(name) for name in ("step0", "fixed0", "carried0"))
    y = graph.call_function(torch.add, (graph.call_function(torch.mul, (x, w)), v))
    y = graph.call_module(leaf, (y,)) if leaf else y
    graph.output((y, y))
    return graph


@pytest.mark.parametrize("samples", [1, 2])
def test_batch_norm_of_each_step_has_the_same_gradients_in_either_layout(samples: int) -> None:
    """Of one sample a step torch's own are wrong where only the first stride does not say channels-last."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 3 * samples, 5, 4, 3, generator=generator, dtype=torch.float64).unbind(0)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        own = x.contiguous(memory_format=layout).requires_grad_()
        weight, bias = (torch.full((5,), value, dtype=torch.float64, requires_grad=True) for value in (1.5, 0.2))
        y = batch_norm_steps(own, weight, bias, None, None, None, True, 0.1, 1e-5, 3)
        found.append((y, *torch.autograd.grad(y, (own, weight, bias), dy)))
    for contiguous, last in zip(*found, strict=True):
        torch.testing.assert_close(last, contiguous, rtol=1e-12, atol=1e-12)


def _around(loop: Loop) -> fx.Graph:
    graph = fx.Graph()
    x, w, v = (graph.placeholder(name) for name in "xwv")
    node = graph.call_function(loop, ((x,), (w,), (v,)))
    graph.output((node,))
    return graph


def test_a_loop_carries_values_and_keeps_all_or_the_last() -> None:
    x, w, v = torch.randn(4, 3), torch.randn(3), torch.randn(3)
    values, want = v, []
    for t in range(4):
        values = x[t] * w + values
        want.append(values)
    body = Body({}, {})
    (stacked,) = body.bind(_around(Loop(_step(), 4, ("all",))))(x, w, v)
    assert torch.equal(stacked[0], torch.stack(want))
    ((last,),) = body.bind(_around(Loop(_step(), 4, ("last",))))(x, w, v)
    assert torch.equal(last, want[-1])


def test_the_first_step_may_be_another() -> None:
    first = fx.Graph()
    x, w, _ = (first.placeholder(name) for name in ("step0", "fixed0", "carried0"))
    first.output((x, w))
    loop = Loop(_step(), 2, ("all",), first)
    x0, w0 = torch.randn(2, 3), torch.randn(3)
    ((y,),) = Body({}, {}).bind(_around(loop))(x0, w0, None)
    assert torch.equal(y[0], w0) and torch.equal(y[1], x0[1] * w0 + x0[0])


def test_a_loop_calls_the_leaves_of_the_body_it_is_bound_to() -> None:
    loop = Loop(_step("net.act"), 3, ("last",))
    graph = _around(loop)
    node = next(n for n in graph.nodes if n.target is loop)
    assert leaf_paths(node) == ("net.act",) and effects.has_effect(node)
    ((y,),) = Body({}, {"net.act": nn.ReLU()}).bind(graph)(-torch.ones(3, 2), torch.ones(2), torch.zeros(2))
    assert torch.equal(y, torch.zeros(2))
    assert sum(inner.op == "call_module" for inner in all_nodes(graph)) == 1


def test_an_unbound_loop_says_so() -> None:
    with pytest.raises(LaunchError, match=r"(?s)outside its network.*Body\.bind"):
        Loop(_step(), 2, ("all",))((), (), ())


def _norm(momentum: float | None) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    nn.init.normal_(norm.weight)
    return norm


def _arguments(norm: nn.BatchNorm2d) -> tuple[Any, ...]:
    state = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return (*state, norm.training, norm.momentum, norm.eps)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
def test_norms_over_steps_are_calls_one_after_the_other(momentum: float | None, training: bool) -> None:
    one, many = _norm(momentum).train(training), _norm(momentum).train(training)
    x = torch.randn(4, 5, 3, 2, 2, dtype=torch.float64)
    y, z = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = torch.cat([one(y[t]) for t in range(4)])
    got = batch_norm_steps(z.flatten(0, 1), *_arguments(many), 4)
    cotangent = torch.randn_like(want)
    want.backward(cotangent)
    got.backward(cotangent)
    assert torch.equal(want, got) and y.grad is not None and z.grad is not None
    assert torch.allclose(y.grad, z.grad, rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(one.parameters(), many.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), many.buffers()))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_norm_of_a_static_input_counts_every_step(momentum: float | None) -> None:
    one, many = _norm(momentum), _norm(momentum)
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    want = [one(x) for _ in range(4)][0]
    got = batch_norm_repeated(x, *_arguments(many), 4)
    assert torch.equal(want, got)
    assert all(torch.allclose(a.double(), b.double(), atol=1e-14) for a, b in zip(one.buffers(), many.buffers()))
    assert int(many.num_batches_tracked) == 4  # type: ignore[arg-type]


@pytest.fixture
def folded() -> Any:
    torch.manual_seed(0)
    return fold(traced(active(Residual(4)), images(2, 2, 5, 5)))


def _loop_node(graph: Any) -> fx.Node:
    return next(node for node in graph.graph.nodes if isinstance(node.target, Loop))


def test_analyses_look_into_loops(folded: Any) -> None:
    PassManager(ANALYZE).run(folded)
    node = _loop_node(folded)
    inner = sum(one.op == "call_function" for one in node.target.body.nodes)
    spikes = next(user for user in node.users)
    assert facts.need(node, TimeRole).dim == 0 and facts.need(node, TimeRole).varies
    assert facts.need(node, Cost).flops >= 4 * inner * facts.need(spikes, Value).numel / 4
    assert facts.get(node, State) is None
    assert effects.is_random(node) is False and effects.writes_buffer(node) is False


def test_a_loop_over_a_neuron_layer_is_one_call_of_it() -> None:
    pytest.importorskip("snntorch")
    from tests.passes.rewrite.fold_time.nets import ConvLoop

    torch.manual_seed(3)
    graph = fold(traced(active(ConvLoop(5)), images(2, 1, 10, 10)))
    PassManager(ANALYZE).run(graph)
    states = [state for node in graph.graph.nodes if (state := facts.get(node, State)) is not None]
    assert states == [State(path, 0, 1) for path in ("lif1", "lif2", "lif3")]
    results = [
        node
        for node in graph.graph.nodes
        if isinstance(getattr(node.args[0] if node.args else None, "target", 0), Loop)
    ]
    assert [facts.need(node, Domain).kind for node in results] == ["spike", "spike", "spike", "real"]
    written = text.print_graph(graph)
    assert "  body\n" in written and "&lif1(" in written
    assert text.print_graph(text.parse_graph(written)) == written


def test_the_verifier_checks_loops(folded: Any) -> None:
    node = _loop_node(folded)
    whole, args = node.target, node.args
    node.args = (args[0], (), args[2])
    with pytest.raises(VerifyError, match="it is given 1 values, which is not what its graphs take"):
        verify(folded)
    node.args = args
    node.target = Loop(whole.body, 4, ("all", "all"), whole.first)
    with pytest.raises(VerifyError, match="do not return the 3 values"):
        verify(folded)
    reads = fx.Graph()
    reads.graph_copy(whole.body, {})
    reads.get_attr("convs.0.weight")
    reads.output(tuple(next(n for n in reads.nodes) for _ in range(2)))
    node.target = Loop(reads, 4, ("all",))
    with pytest.raises(VerifyError, match="reads a tensor that it is not given"):
        verify(folded)
    node.target = Loop(_step("gone"), 4, ("all",))
    with pytest.raises(VerifyError, match=r"it calls \['gone'\]"):
        verify(folded)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["%l = loop 3 (all)((%x,), (), ())", "return (%l,)"], "line 2, column 1: a loop is followed by its body"),
        (["%l = loop 3 (some)((%x,), (), ())"], "'some' is not kept.*valid: all, last"),
        (["%l = loop 3 (all)((%x,), (), ())", "body", "%a = input a"], "does not end with a return"),
        (["return (%x,)", "%y = input y"], "line 3, column 1: the graph ended with the return above"),
    ],
)  # fmt: skip
def test_texts_of_loops_that_cannot_be_read(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        text.parse_fx("\n".join(["%x = input x", *lines]))


def test_folded_shapes_grow_with_the_batch(folded: Any) -> None:
    for node in folded.graph.nodes:
        value = facts.get(node, Value)
        if value is not None and node.name == "conv2d_1":
            assert (value.shape[0], value.slopes[0]) == (8, 4)
    several = facts.need(_loop_node(folded), Values)
    assert several.items[0].slopes[:2] == (0, 1)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("steps", [2, 5, 25])
def test_one_norm_over_all_steps_is_the_norms_of_the_steps(steps: int, tracked: bool) -> None:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(3, track_running_stats=tracked).double() for _ in range(2)]
    norms[1].load_state_dict(norms[0].state_dict())
    inputs = [torch.randn(steps * 4, 3, 5, 5, dtype=torch.float64).requires_grad_() for _ in range(1)] * 2
    made = []
    for norm, x, over_steps in zip(norms, inputs, (batch_norm_steps, batch_norm_at_once), strict=True):
        state = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        y = over_steps(x, norm.weight, norm.bias, *state, True, 0.1, norm.eps, steps)
        (grad,) = torch.autograd.grad(y.square().sum() + (y * x.detach()).sum(), x, retain_graph=True)
        weights = torch.autograd.grad((y * x.detach()).sum(), (norm.weight, norm.bias))
        made.append((y, grad, *weights, *(value for value in state if value is not None)))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in zip(*made, strict=True))
    assert len(made[0]) == (7 if tracked else 4)


def test_autocast_does_not_round_the_running_statistics() -> None:
    torch.manual_seed(0)
    x, found = torch.randn(4 * 8, 3, 2, 2), []
    for enabled in (False, True):
        mean, var = torch.zeros(3), torch.ones(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            batch_norm_at_once(x, None, None, mean, var, None, True, 0.1, 1e-5, 4)
        found.append((mean, var))
    assert all(torch.equal(a, b) and bool((a != start).all()) for a, b, start in zip(*found, (0.0, 1.0), strict=True))
