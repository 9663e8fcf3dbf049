"""analyze-time: the time dim through every layout, the steps of loops, what varies, and the layout error."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts
from snnpart.errors import PlanError
from snnpart.facts import State, TimeRole, Value
from snnpart.graph import SpikeGraph
from snnpart.ops import Surrogate
from snnpart.pass_manager import PassManager
from snnpart.passes.analyze.state import AnalyzeState
from snnpart.passes.analyze.time import AnalyzeTime
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.trace import trace
from tests.graphs import calls, graph_of
from tests.neurons import Spike
from tests.zoo import ZOO

T, N = 5, 2
FRAMES = torch.rand(T, N, 3, 4, 4)


def analysed(graph: SpikeGraph) -> SpikeGraph:
    PassManager([Canonicalize(), AnalyzeState(), AnalyzeTime()]).run(graph)
    return graph


def last_role(
    function: Callable[..., Any], x: Tensor = FRAMES, time_dim: int = 0, batch: int = 1, **layers: Any
) -> TimeRole:
    graph = analysed(graph_of(function, x, layers=layers, in_dims=batch, time_dims=time_dim))
    node = next(node for node in reversed(graph.graph.nodes) if node.op == "output").all_input_nodes[0]
    return facts.need(node, TimeRole)


MOVES: dict[str, tuple[Callable[[Tensor], Tensor], int | None, bool]] = {
    "unchanged": (lambda x: x * 2 + 1, 0, False),
    "merged with the batch": (lambda x: x.flatten(0, 1), 0, True),
    "merged by a view": (lambda x: x.reshape(-1, 3, 4, 4), 0, True),
    "merged and split again": (lambda x: x.flatten(0, 1).exp().view(T, -1, 3, 4, 4), 0, False),
    "unflatten": (lambda x: x.flatten(0, 1).unflatten(0, (T, x.shape[1])), 0, False),
    "pixels flattened": (lambda x: x.flatten(2), 0, False),
    "transposed": (lambda x: x.transpose(0, 1), 1, False),
    "permuted": (lambda x: x.permute(1, 2, 3, 4, 0), 4, False),
    "moved": (lambda x: x.movedim(0, -1), 4, False),
    "a new dim before": (lambda x: x.unsqueeze(0), 1, False),
    "squeezed": (lambda x: x[:, :, :1].squeeze(2), 0, False),
    "merged with channels": (lambda x: x.permute(1, 0, 2, 3, 4).flatten(1, 2), None, False),
    "mean over time": (lambda x: x.mean(0), None, False),
    "mean over pixels": (lambda x: x.mean((-1, -2)), 0, False),
    "mean over pixels, kept": (lambda x: x.mean((3, 4), keepdim=True), 0, False),
    "one step": (lambda x: x[1], None, False),
    "all steps, one channel": (lambda x: x[:, :, 0], 0, False),
    "channels joined": (lambda x: torch.cat([x, x], 2), 0, False),
    "halves": (lambda x: x.chunk(3, 2)[1], 0, False),
    "attention": (lambda x: x.flatten(3) @ x.flatten(3).transpose(-1, -2), 0, False),
    "pooled": (lambda x: torch.max_pool2d(x.flatten(0, 1), 2), 0, True),
    "broadcast": (lambda x: x + torch.ones(3, 1, 1), 0, False),
}


@pytest.mark.parametrize("name", MOVES)
def test_the_time_dim_follows_the_operation(name: str) -> None:
    function, dim, merged = MOVES[name]
    role = last_role(function)
    assert (role.dim, role.merged) == (dim, merged)


def test_convolution_linear_and_norm_keep_the_merged_dim() -> None:
    layers = {"conv": nn.Conv2d(3, 6, 3), "bn": nn.BatchNorm2d(6), "fc": nn.Linear(6, 7)}
    role = last_role(lambda m, x: m.fc(m.bn(m.conv(x.flatten(0, 1))).mean((2, 3))), **layers)
    assert role == TimeRole(0, True, None, True)


def test_batch_first_layout() -> None:
    x = torch.rand(N, T, 3, 4, 4)
    role = last_role(lambda x: x.transpose(0, 1).flatten(0, 1), x, time_dim=1, batch=0)
    assert role == TimeRole(0, True)


def test_reading_single_steps() -> None:
    graph = analysed(graph_of(lambda x: x[3] + x.select(0, 1), FRAMES, in_dims=1, time_dims=0))
    steps = {node.target: facts.need(node, TimeRole).step for node in graph.graph.nodes if node.op == "call_function"}
    assert steps == {operator.getitem: 3, torch.select: 1, torch.add: 3}


class Loop(nn.Module):
    """A loop over T steps with a hand-written neuron; `static` shows the same image at every step."""

    def __init__(self, static: bool, steps: int = T) -> None:
        super().__init__()
        self.conv, self.fc, self.static, self.steps = nn.Conv2d(3, 4, 3), nn.Linear(16, 4), static, steps

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros(()), []
        for t in range(self.steps):
            v = 0.5 * v + self.conv(x if self.static else x[t])
            z = Spike.apply(v - 0.1)
            v = v * (1 - z.detach())
            out.append(self.fc(z.flatten(1)))
        return torch.stack(out)


def test_a_loop_over_a_static_image() -> None:
    graph = analysed(trace(Loop(True), (FRAMES[0],)))
    roles = [facts.need(node, TimeRole) for node in calls(graph, torch.conv2d)]
    assert [role.step for role in roles] == list(range(T)) and not any(role.varies for role in roles)
    spikes = [facts.need(node, TimeRole) for node in calls(graph, Surrogate(Spike))]
    assert [role.step for role in spikes] == list(range(T)) and all(role.varies for role in spikes)
    (stack,) = calls(graph, torch.stack)
    assert facts.need(stack, TimeRole) == TimeRole(0, False, None, True)


def test_a_loop_over_frames() -> None:
    graph = analysed(trace(Loop(False), (FRAMES,), in_dims=1, time_dims=0))
    roles = [facts.need(node, TimeRole) for node in calls(graph, torch.conv2d)]
    assert [role.step for role in roles] == list(range(T)) and all(role.varies for role in roles)


@pytest.mark.parametrize("name", ["small_sew-m", "spikformer", "spiking_vgg11_bn-m"])
def test_multi_step_networks_know_time_everywhere(name: str) -> None:
    if name not in ZOO:
        pytest.skip("the framework is not installed")
    module, inputs = ZOO[name].build()
    graph = analysed(trace(module, inputs, **ZOO[name].dims))
    means = {node for node in calls(graph, torch.mean) if node.args[1] in (0, (0,))}
    steps = {node for node in calls(graph, operator.getitem) if _takes_a_step(node)}  # dropout draws one mask for all
    timeless, fixed = means | steps, {node for node in graph.graph.nodes if node.op == "get_attr"}
    for node in graph.graph.nodes:
        value, role = facts.get(node, Value), facts.get(node, TimeRole)
        if value is None or role is None or not any(value.slopes):
            continue
        if node in timeless or (node.all_input_nodes and set(node.all_input_nodes) <= timeless | fixed):
            timeless.add(node)
            assert role.dim is None, node.name
        elif role.varies:
            assert role.dim is not None, node.name
            assert role.merged == (value.slopes[role.dim] > 1), node.name


def test_a_repeated_static_image_does_not_vary() -> None:
    if "ms_resnet" not in ZOO:
        pytest.skip("SpikingJelly is not installed")
    module, inputs = ZOO["ms_resnet"].build()
    graph = analysed(trace(module, inputs, **ZOO["ms_resnet"].dims))
    first = facts.need(calls(graph, torch.conv2d)[0], TimeRole)
    assert (first.dim, first.merged, first.varies) == (0, True, False)
    neuron = next(node for node in graph.graph.nodes if node.op == "call_module")
    assert facts.need(neuron, TimeRole) == TimeRole(0, False, None, True)


def test_the_batch_taken_as_time_is_refused() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    module = nn.Sequential(nn.Linear(4, 3), neuron.LIFNode(step_mode="m"))
    graph = trace(module, (torch.rand(6, 4),))
    with pytest.raises(PlanError) as caught:
        analysed(graph)
    message = str(caught.value)
    assert "dim 0 of the input [6, 3] is the batch, but neuron layer '1' takes it as time" in message
    assert 'input_layout="TNCHW"' in message and "module '1'" in message


def test_state_numbers_the_calls_of_each_layer() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    module = nn.Sequential(nn.Linear(4, 3), neuron.LIFNode(), nn.Linear(3, 3), neuron.IFNode())
    graph = analysed(trace(module, (torch.rand(6, 4),), time_steps=3))
    states = [facts.need(node, State) for node in graph.graph.nodes if node.op == "call_module"]
    assert states == [State(path, call, 3) for call in range(3) for path in ("1", "3")]


def _takes_a_step(node: Any) -> bool:
    """Whether the node is `x[0]` of a tensor [T, ...]."""
    value = facts.get(node.args[0], Value)
    return node.args[1] == 0 and value is not None and len(value.shape) > len(facts.need(node, Value).shape)
