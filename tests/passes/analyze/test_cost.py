"""analyze-cost: flops, bytes, saved bytes and times of single operations, by hand; speed on deep graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.facts import Cost
from snnpart.graph import SpikeGraph
from snnpart.pass_manager import PassManager
from snnpart.passes import REWRITE
from snnpart.passes.analyze.cost import AnalyzeCost
from snnpart.passes.analyze.state import AnalyzeState
from snnpart.passes.rewrite.fuse_neurons import is_fused
from snnpart.trace import trace
from tests.graphs import calls, graph_of

PROFILE = MachineProfile(name="toy", flops={"float32": 1e9}, copy=1e9, launch_us=1.0)


def analysed(graph: SpikeGraph) -> SpikeGraph:
    PassManager([*REWRITE, AnalyzeState(), AnalyzeCost(PROFILE)]).run(graph)
    return graph


def cost(function: Callable[..., Any], target: Any, *inputs: Tensor, **layers: Any) -> Cost:
    graph = analysed(graph_of(function, *inputs, layers=layers))
    return facts.need(calls(graph, target)[0], Cost)


def test_convolution() -> None:
    layers = {"conv": nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False)}
    found = cost(lambda m, x: m.conv(x), torch.conv2d, torch.rand(2, 4, 5, 5), **layers)
    assert found.flops == 2 * (2 * 6 * 5 * 5) * (4 // 2) * 9
    assert found.read == 4 * (2 * 4 * 25 + 6 * 2 * 9) and found.written == 4 * 2 * 6 * 25
    assert found.saved == 4 * 2 * 4 * 25, "the input, not the weight"
    assert found.backward_flops == found.flops, "the network's input needs no gradient"
    assert found.forward_us == pytest.approx(1 + 1e6 * max(found.flops, found.read + found.written) / 1e9)


def test_transposed_convolution_counts_its_input() -> None:
    layers = {"up": nn.ConvTranspose2d(4, 6, 2, stride=2)}
    found = cost(lambda m, x: m.up(x), torch.conv_transpose2d, torch.rand(2, 4, 5, 5), **layers)
    assert found.flops == 2 * (2 * 4 * 25) * 6 * 4


def test_attention_is_two_products() -> None:
    q, k, v = torch.rand(2, 3, 5, 4), torch.rand(2, 3, 7, 4), torch.rand(2, 3, 7, 6)
    found = cost(F.scaled_dot_product_attention, F.scaled_dot_product_attention, q, k, v)
    assert found.flops == 2 * (2 * 3) * (5 * 4 * 7 + 5 * 7 * 6)


def test_linear_after_linear_has_two_gradients() -> None:
    layers = {"a": nn.Linear(3, 5), "b": nn.Linear(5, 7)}
    graph = analysed(graph_of(lambda m, x: m.b(m.a(x)), torch.rand(2, 3), layers=layers))
    first, second = (facts.need(node, Cost) for node in calls(graph, F.linear))
    assert (first.flops, second.flops) == (2 * 2 * 3 * 5, 2 * 2 * 5 * 7)
    assert (first.backward_flops, second.backward_flops) == (first.flops, 2 * second.flops)


def test_views_and_tensors_cost_nothing() -> None:
    graph = analysed(graph_of(lambda m, x: m.fc(x.flatten(1)), torch.rand(2, 3, 4), layers={"fc": nn.Linear(12, 2)}))
    assert facts.need(calls(graph, torch.flatten)[0], Cost) == Cost()
    assert all(facts.need(node, Cost) == Cost() for node in graph.graph.nodes if node.op in ("get_attr", "placeholder"))


def test_a_value_is_saved_once() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.fc(x)
        return y * y + m.fc(y) + y.view(2, 4, 1).exp().flatten(1)

    graph = analysed(graph_of(forward, torch.rand(2, 4), layers={"fc": nn.Linear(4, 4)}))
    x, y = 4 * 2 * 4, 4 * 2 * 4
    saved = [facts.need(node, Cost).saved for node in graph.graph.nodes if facts.get(node, Cost)]
    assert sum(saved) == x + y + y, "the input, y (by the product and the linear), exp's result"


def test_nothing_is_saved_without_gradients() -> None:
    found = cost(lambda x: x.exp() * x, torch.mul, torch.rand(2, 4))
    assert (found.saved, found.backward_flops, found.backward_us) == (0, 0, 0)


def test_a_multi_step_neuron_launches_for_each_step() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")

    def launches(steps: int) -> float:
        module = nn.Sequential(neuron.LIFNode(step_mode="m"))
        graph = analysed(trace(module, (torch.rand(steps, 2, 3),), in_dims=1, time_dims=0))
        node = next(node for node in graph.graph.nodes if node.op == "call_module")
        return facts.need(node, Cost).forward_us

    assert launches(8) == pytest.approx(2 * launches(4), rel=0.01)


def test_a_neuron_that_is_to_be_fused_is_one_kernel() -> None:
    """It reads its input and writes its spikes; backward reads their gradient and the input, and writes its own."""
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    module = nn.Sequential(layer.Conv2d(2, 3, 1, step_mode="m"), neuron.LIFNode(step_mode="m"))
    graph = trace(module, (torch.rand(4, 2, 2, 5, 5),), in_dims=1, time_dims=0)
    fused = partial(is_fused, leaves=graph.leaves)
    PassManager([*REWRITE, AnalyzeState(), AnalyzeCost(PROFILE, fused)]).run(graph)
    (node,) = (node for node in graph.graph.nodes if node.op == "call_module")
    size = 4 * 4 * 2 * 3 * 25
    found = facts.need(node, Cost)
    assert (found.read, found.written, found.launch_us) == (size, size, 1.0)
    assert found.forward_us == pytest.approx(1 + 2 * size / 1e3)
    assert found.backward_us == pytest.approx(1 + 3 * size / 1e3)


def test_weights_inside_a_leaf_are_multiplied() -> None:
    norse = pytest.importorskip("norse.torch")
    graph = analysed(trace(nn.Sequential(norse.LIFRecurrentCell(6, 7)), (torch.rand(2, 6),)))
    node = next(node for node in graph.graph.nodes if node.op == "call_module")
    assert facts.need(node, Cost).flops >= 2 * 2 * (6 * 7 + 7 * 7)
