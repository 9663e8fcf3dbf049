"""analyze-domain: what is claimed of a value holds for the values that occur, and what can be claimed is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import facts
from snnpart.facts import Domain, Value
from snnpart.graph import Body
from snnpart.pass_manager import PassManager
from snnpart.passes import REWRITE
from snnpart.passes.analyze.domain import AnalyzeDomain
from snnpart.trace import trace
from tests.graphs import calls, graph_of

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
SPIKE, REAL = Domain("spike", 0, 1), Domain("real")


def spikes(x: Tensor) -> Tensor:
    return (x >= 0).to(torch.float32)


CASES: dict[str, tuple[Callable[[Tensor], Any], Domain]] = {
    "input": (lambda x: x, REAL),
    "comparison": (lambda x: x >= 0, SPIKE),
    "cast": (spikes, SPIKE),
    "sum of spikes": (lambda x: spikes(x) + spikes(x - 1), Domain("integer", 0, 2)),
    "three of them": (lambda x: spikes(x) + spikes(x - 1) + spikes(x + 1), Domain("integer", 0, 3)),
    "difference": (lambda x: spikes(x) - spikes(x - 1), Domain("ternary", -1, 1)),
    "inverted": (lambda x: 1 - spikes(x), SPIKE),
    "gated": (lambda x: spikes(x) * spikes(x - 1), SPIKE),
    "SEW's IAND": (lambda x: spikes(x) * (1 - spikes(x - 1)), SPIKE),
    "scaled": (lambda x: spikes(x) * 0.5, Domain("real", 0, 0.5)),
    "scaled by 3": (lambda x: spikes(x) * 3, Domain("integer", 0, 3)),
    "halved": (lambda x: spikes(x) / 2, Domain("real", 0, 0.5)),
    "detached": (lambda x: spikes(x).detach(), SPIKE),
    "view": (lambda x: spikes(x).transpose(1, 2).flatten(1).unsqueeze(0), SPIKE),
    "cat": (lambda x: torch.cat([spikes(x), 2 * spikes(x)], 1), Domain("integer", 0, 2)),
    "stack": (lambda x: torch.stack([spikes(x), spikes(x)]), SPIKE),
    "max pool": (lambda x: F.max_pool1d(spikes(x), 2), SPIKE),
    "average pool": (lambda x: F.avg_pool1d(spikes(x), 2), Domain("real", 0, 1)),
    "mean": (lambda x: spikes(x).mean(1), Domain("real", 0, 1)),
    "sum over a fixed dim": (lambda x: spikes(x).sum(2), Domain("integer", 0, 4)),
    "sum over the batch": (lambda x: spikes(x).sum(0), Domain("integer", 0)),
    "attention": (lambda x: spikes(x) @ spikes(x).transpose(1, 2), Domain("integer", 0, 4)),
    "relu": (lambda x: (spikes(x) - spikes(x - 1)).relu(), SPIKE),
    "clamp": (lambda x: (spikes(x) + spikes(x)).clamp(max=1), SPIKE),
    "clamp of a real": (lambda x: x.clamp(-1, 1), Domain("real", -1, 1)),
    "sign": (lambda x: x.sign(), Domain("ternary", -1, 1)),
    "sigmoid": (lambda x: x.sigmoid(), Domain("real", 0, 1)),
    "rounded": (lambda x: x.clamp(0, 4).round(), Domain("integer", 0, 4)),
    "where": (lambda x: torch.where(x > 0, spikes(x), 0.0), SPIKE),
    "padded": (lambda x: F.pad(spikes(x), (1, 1)), SPIKE),
    "padded with 2": (lambda x: F.pad(spikes(x), (1, 1), value=2.0), Domain("integer", 0, 2)),
    "dropout": (lambda x: F.dropout(spikes(x), 0.5, True), REAL),
    "dropout off": (lambda x: F.dropout(spikes(x), 0.5, False), SPIKE),
    "interpolated": (lambda x: F.interpolate(spikes(x), scale_factor=2.0), SPIKE),
    "written into zeros": (lambda x: _written(x), SPIKE),
    "items of max": (lambda x: spikes(x).max(1)[0], SPIKE),
    "negative": (lambda x: -spikes(x), Domain("ternary", -1, 0)),
    "absolute": (lambda x: (spikes(x) - spikes(x - 1)).abs(), SPIKE),
    "squared": (lambda x: (spikes(x) * 2).square(), Domain("integer", 0, 4)),
    "unknown": (lambda x: torch.special.bessel_j0(spikes(x)), REAL),
}


def _written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = spikes(x)[:, 0]
    return out


def result(function: Callable[[Tensor], Any]) -> tuple[Domain, Tensor]:
    graph = graph_of(function, X)
    PassManager([*REWRITE, AnalyzeDomain()]).run(graph)
    node = next(node for node in reversed(graph.graph.nodes) if node.op == "output").all_input_nodes[0]
    sizes = [2] if calls(graph, "batch_size") else []
    (value,) = Body({}, {}).bind(graph.graph)(X, *sizes)
    return facts.need(node, Domain), value


@pytest.mark.parametrize("name", CASES)
def test_domain_of_an_operation(name: str) -> None:
    function, expected = CASES[name]
    found, value = result(function)
    assert found == expected
    assert float(value.min()) >= found.low and float(value.max()) <= found.high
    if found.kind != "real":
        assert torch.equal(value.float(), value.float().round())


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class sign(Spike):  # noqa: N801
    """A surrogate that has the name of an operation."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u * 2


@pytest.mark.parametrize(("surrogate", "domain"), [(Spike, Domain("integer", 1, 2)), (sign, REAL)])
def test_a_surrogate_gives_what_its_forward_computes(surrogate: Any, domain: Domain) -> None:
    """Not what its name says."""
    graph = graph_of(lambda x: surrogate.apply(x) + 1, X)
    PassManager([*REWRITE, AnalyzeDomain()]).run(graph)
    assert facts.need(calls(graph, torch.add)[0], Domain) == domain


def test_neurons_say_what_they_emit_and_residuals_add_up() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.fc = neuron.IFNode(), neuron.LIFNode(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            return self.b(self.fc(first)) + first

    graph = trace(Residual(), (torch.rand(3, 4),))
    PassManager([*REWRITE, AnalyzeDomain()]).run(graph)
    assert [facts.need(node, Domain) for node in graph.graph.nodes if node.op == "call_module"] == [SPIKE, SPIKE]
    assert facts.need(calls(graph, F.linear)[0], Domain) == REAL
    assert facts.need(calls(graph, torch.add)[0], Domain) == Domain("integer", 0, 2)


def test_only_the_first_result_of_a_neuron_is_spikes() -> None:
    snn = pytest.importorskip("snntorch")
    graph = trace(_Leaky(snn), (torch.rand(3, 4),))
    PassManager([*REWRITE, AnalyzeDomain()]).run(graph)
    items = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "getitem"]
    kinds = {node.args[1]: facts.need(node, Domain).kind for node in items if facts.get(node, Value)}
    assert kinds == {0: "spike", 1: "real"}


class _Leaky(nn.Module):
    def __init__(self, snn: Any) -> None:
        super().__init__()
        self.leaky = snn.Leaky(beta=0.9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spk, mem = self.leaky(x, self.leaky.init_leaky())
        return spk, mem
