"""canonicalize: each spelling becomes the one of `spelling`, and nothing changes by a bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import ops
from snnpart.facts import Value, get
from snnpart.pass_manager import PassManager
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.passes.rewrite.spelling import SIGNATURES
from tests.graphs import assert_equal, calls, execute, graph_of
from tests.zoo import SMALL, ZOO

X = torch.linspace(-2.0, 2.0, 96, dtype=torch.float64).reshape(2, 3, 4, 4)


def assigned(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., 0] = x.sum(-1)
    return out


SPELLINGS: dict[str, tuple[Callable[[Tensor], Any], Any, tuple[Any, ...]]] = {
    "x + y": (lambda x: x + x * 2, torch.add, ()),
    "x.add(y)": (lambda x: x.add(2.0), torch.add, (2.0,)),
    "2 + x": (lambda x: 2 + x, torch.add, (2,)),
    "x - 1": (lambda x: x - 1, torch.sub, (1,)),
    "1 - x": (lambda x: 1 - x, torch.rsub, (1,)),
    "torch.subtract": (lambda x: torch.subtract(x, 1), torch.sub, (1,)),
    "2 * x": (lambda x: 2 * x, torch.mul, (2,)),
    "x / 2": (lambda x: x / 2, torch.div, (2,)),
    "3 / x": (lambda x: 3.0 / (x + 5), torch.mul, (3.0,)),
    "x ** 2": (lambda x: x**2, torch.pow, (2,)),
    "-x": (lambda x: -x, torch.neg, ()),
    "x @ y": (lambda x: x @ x, torch.matmul, ()),
    "x >= 0": (lambda x: (x >= 0).to(x), torch.ge, (0,)),
    "0 < x": (lambda x: (0 < x).to(x), torch.gt, (0,)),  # noqa: SIM300
    "view": (lambda x: x.view(2, 3, 16), torch.reshape, ((2, 3, 16),)),
    "view(tuple)": (lambda x: x.view((2, 3, 16)), torch.reshape, ((2, 3, 16),)),
    "reshape -1": (lambda x: x.reshape(2, -1, 16), torch.reshape, ((2, -1, 16),)),
    "flatten": (lambda x: x.flatten(1), torch.flatten, (1, 3)),
    "flatten keyword": (lambda x: torch.flatten(x, start_dim=-2), torch.flatten, (2, 3)),
    "permute": (lambda x: x.permute(0, 2, 3, 1), torch.permute, ((0, 2, 3, 1),)),
    "permute negative": (lambda x: x.permute((0, -1, -2, 1)), torch.permute, ((0, 3, 2, 1),)),
    "swapaxes": (lambda x: x.swapaxes(-1, 1), torch.transpose, (3, 1)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), torch.unsqueeze, (4,)),
    "mean": (lambda x: x.mean((-1, -2)), torch.mean, ((3, 2), False)),
    "sum all": (lambda x: x.sum(), torch.sum, (None, False)),
    "stack": (lambda x: torch.stack([x, x], -1), torch.stack, (4,)),
    "cat": (lambda x: torch.concat((x, x), dim=-3), torch.cat, (1,)),
    "softmax": (lambda x: F.softmax(x, dim=-1), torch.softmax, (3,)),
    "x.softmax": (lambda x: x.softmax(-1), torch.softmax, (3,)),
    "F.relu": (lambda x: F.relu(x), torch.relu, ()),
    "F.relu in place": (lambda x: F.relu(x * 1.0, inplace=True), torch.relu, ()),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), torch.max_pool2d, ((2, 2), (2, 2), (0, 0), (1, 1), False)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), F.avg_pool2d, ((2, 2), (2, 2), (0, 0), False, True)),
    "clamp": (lambda x: x.clip(min=0), torch.clamp, (0, None)),
    "x[0]": (lambda x: x[:, 0], operator.getitem, ((slice(None), 0),)),
    "x[:, 0, ...]": (lambda x: x[:, 0, ...], operator.getitem, ((slice(None), 0, slice(None), slice(None)),)),
    "x[..., 0]": (lambda x: x[..., 0], operator.getitem, ((slice(None),) * 3 + (0,),)),
    "x[0, ..., None, 1]": (
        lambda x: x[0, ..., None, 1],
        operator.getitem,
        ((0, slice(None), slice(None), None, 1),),
    ),
    "out[..., 0] =": (assigned, ops.index_assign, ((slice(None), slice(None), slice(None), 0),)),
    "dropout": (lambda x: F.dropout(x, 0.25, True), torch.dropout, (0.25, True)),
    "chunk": (lambda x: x.chunk(3, -3)[1], torch.chunk, (3, 1)),
}


def canonical(graph: Any) -> Any:
    changed = graph.copy()
    PassManager([Canonicalize()]).run(changed)
    return changed


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_spelling(name: str) -> None:
    function, target, rest = SPELLINGS[name]
    graph = graph_of(function, X)
    changed = canonical(graph)
    node = calls(changed, target)[-1]
    assert node.op == "call_function" and not node.kwargs
    if target is not torch.add or rest:
        assert tuple(arg for arg in node.args[1:] if not isinstance(arg, torch.fx.Node)) == rest
    assert_equal(execute(graph, [X]), execute(changed, [X]))


@pytest.mark.parametrize("bias", [True, False])
def test_convolution_has_all_arguments_by_position(bias: bool) -> None:
    layers = {"conv": nn.Conv2d(3, 5, 3, padding=1, bias=bias, dtype=torch.float64)}
    graph = graph_of(lambda m, x: F.conv2d(x, m.conv.weight, m.conv.bias, padding=1), X, layers=layers)
    (node,) = calls(canonical(graph), torch.conv2d)
    assert node.args[3:] == ((1, 1), (1, 1), (1, 1), 1)
    assert (node.args[2] is None) is not bias
    assert_equal(execute(graph, [X]), execute(canonical(graph), [X]))


def test_casts_become_to() -> None:
    graph = canonical(graph_of(lambda x: x.float().double() + 1, X))
    assert [node.args[1] for node in calls(graph, "to")] == [torch.float32, torch.float64]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1.5).to(torch.float64) + 1,
        lambda x: (x * 1.5).contiguous() + 1,
        lambda x: (x * 1.5).reshape(2, 3, 4, 4) + 1,
        lambda x: (x * 1.5).clone() + 1,
    ],
)
def test_identities_go(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function, X)
    changed = canonical(graph)
    assert [node.target for node in changed.graph.nodes if node.op.startswith("call")] == [torch.mul, torch.add]
    assert_equal(execute(graph, [X]), execute(changed, [X]))


def test_contiguous_of_a_transposed_value_stays() -> None:
    assert calls(canonical(graph_of(lambda x: x.transpose(1, 2).contiguous() + 1, X)), "contiguous")


def test_clone_of_a_buffer_that_is_written_later_stays() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            before = self.seen.clone()
            self.seen.add_(x.detach().mean((0, 2, 3)))
            return x + before.view(1, 3, 1, 1)

    from snnpart.trace import trace

    graph = trace(Counter(), (X,))
    changed = canonical(graph)
    assert calls(changed, torch.clone) and calls(changed, ops.assign)
    assert_equal(execute(graph, [X]), execute(changed, [X]))


def test_dead_code_goes_and_effects_stay() -> None:
    layers = {"bn": nn.BatchNorm2d(3, dtype=torch.float64)}

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        (x.exp() + 3).log()
        m.bn(x)
        F.dropout(x, 0.5, True)
        return F.dropout(x, 0.5, True)

    graph = graph_of(forward, X, layers=layers)
    changed = canonical(graph)
    assert not calls(changed, torch.exp) and not calls(changed, torch.log)
    assert len(calls(changed, ops.batch_norm)) == 1
    assert len(calls(changed, torch.dropout)) == 2, "a dead dropout draws numbers: those after it would change"
    assert_equal(execute(graph, [X]), execute(changed, [X]))


def test_a_batch_size_nobody_needs_goes() -> None:
    graph = graph_of(lambda x: (x.view(x.shape[0], 48), x.reshape(x.shape[0] * 3, 16) * 2)[0], X)
    assert any(node.target == "batch_size" for node in graph.graph.nodes)
    changed = graph.copy()
    for node in reversed(list(changed.graph.nodes)):
        if node.op == "call_function" and node.target is not torch.reshape and not node.users:
            changed.graph.erase_node(node)
    last = calls(canonical(changed), "batch_size")
    assert all(node.users for node in last)


def test_every_signature_accepts_its_own_form() -> None:
    """All arguments by position, defaults filled in, is a call that torch takes."""
    x, w = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(5, 3, 1, dtype=torch.float64)
    assert torch.equal(torch.conv1d(x, w, None, (1,), (0,), (1,), 1), F.conv1d(x, w))
    assert torch.equal(torch.sum(x, None, False), x.sum())
    assert torch.equal(torch.clamp(x, None, 0.5), x.clamp(max=0.5))
    assert torch.equal(torch.max_pool1d(x, (2,), (2,), (0,), (1,), False), F.max_pool1d(x, 2))
    assert torch.equal(torch.layer_norm(x, (4,), None, None, 1e-5), F.layer_norm(x, (4,)))
    for signature in SIGNATURES.values():
        assert set(signature.dims) | set(signature.spatial) | set(signature.defaults) <= set(signature.names)


@pytest.mark.parametrize("name", [name for name in SMALL if name in ("small_sew-m", "spikformer", "unet", "tied")])
def test_real_models_compute_the_same(name: str) -> None:
    from snnpart.trace import trace

    module, inputs = ZOO[name].build()
    graph = trace(module, inputs, **ZOO[name].dims)
    changed = canonical(graph)
    methods = {node.target for node in changed.graph.nodes if node.op == "call_method"}
    assert methods <= {"to", "contiguous", "expand", "repeat", "type_as", "new_zeros"}
    assert all(get(node, Value) for node in changed.graph.nodes if node.op == "get_attr" and node.target != "training")
    assert_equal(execute(graph, inputs), execute(changed, inputs))
