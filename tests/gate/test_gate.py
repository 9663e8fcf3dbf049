"""The gate lets equal graphs through and names what differs in others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import ops, parallelize
from snnpart.costs import default_profile
from snnpart.errors import VerifyError
from snnpart.gate import check_program, check_trace
from snnpart.gate.compare import TOLERANCES
from snnpart.graph import SpikeGraph, output_node
from snnpart.ops_time import batch_norm_repeated, batch_norm_steps
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from snnpart.trace import trace
from tests.neurons import BoxSpike, SoftLIF
from tests.zoo import ZOO


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.lif, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), SoftLIF(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 3)
        for _ in range(3):
            out = out + self.b(F.dropout(self.lif(self.bn(self.a(x)) + 0.5), 0.25, self.training))
        return out


def traced(model: nn.Module, x: Tensor, training: bool = True) -> SpikeGraph:
    return trace(model, x, training=training)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4)


def change(graph: SpikeGraph, name: str, argument: int, value: object) -> None:
    """Break the graph: give the node with this name another argument."""
    node = next(n for n in graph.graph.nodes if n.name == name)
    node.args = (*node.args[:argument], value, *node.args[argument + 1 :])


@pytest.mark.parametrize("training", [True, False])
def test_equal_graph_passes(x: Tensor, training: bool) -> None:
    net = Net().train(training)
    report = check_trace(net, traced(net, x, training), x)
    assert (report.traced.output, report.traced.gradient, report.traced.buffer, report.traced.flips) == (0, 0, 0, 0)
    assert report.program is None and report.seconds > 0 and report.unverified == {}


def test_the_module_is_left_as_it_was(x: Tensor) -> None:
    net = Net()
    net(x).sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    values = {name: value.clone() for name, value in net.state_dict().items()}
    membrane, flags = net.lif.mem, [m.training for m in net.modules()]
    random = torch.get_rng_state()
    check_trace(net, traced(net, x), x)
    assert all(p.grad is gradients[name] for name, p in net.named_parameters())
    assert all(torch.equal(values[name], value) for name, value in net.state_dict().items())
    assert net.lif.mem is membrane and flags == [m.training for m in net.modules()]
    assert torch.equal(random, torch.get_rng_state())


def test_a_wrong_constant_is_named_with_its_node_and_line(x: Tensor) -> None:
    net = Net()
    graph = traced(net, x)
    change(graph, "sub", 1, 0.9)
    with pytest.raises(VerifyError) as error:
        check_trace(net, graph, x)
    text = str(error.value)
    assert "the traced graph differs from the module: output '0' by" in text
    assert "module 'lif'" in text and "neurons.py:" in text and "node %" in text
    assert 'verify="off"' in text


def test_a_lost_surrogate_is_seen_by_its_gradients_alone(x: Tensor) -> None:
    """The forward stays bit-equal; what torch.export does to snnTorch must not pass here."""
    net = Net()
    graph = traced(net, x)
    for node in list(graph.graph.nodes):
        if getattr(node.target, "function", None) is BoxSpike:
            with graph.graph.inserting_after(node):
                cut = graph.graph.call_function(torch.detach, (node,))
            node.replace_all_uses_with(cut)
            cut.args = (node,)
    with pytest.raises(VerifyError, match=r"gradient 'a.weight' by .* of its scale \(allowed 1e-05\)"):
        check_trace(net, graph, x)


def test_a_wrong_buffer_is_seen(x: Tensor) -> None:
    net = Net()
    graph = traced(net, x)
    change(graph, "batch_norm", 7, 0.2)
    with pytest.raises(VerifyError, match="buffer 'bn.running_mean' by"):
        check_trace(net, graph, x)


def test_float64_is_compared_to_1e_9(x: Tensor) -> None:
    net, x = Net().double(), x.double()
    graph = traced(net, x)
    last = output_node(graph.graph).all_input_nodes[0]
    with graph.graph.inserting_after(last):
        shifted = graph.graph.call_function(torch.add, (last, 1e-7))
    output_node(graph.graph).args = ((shifted,),)
    with pytest.raises(VerifyError, match="allowed 1e-09"):
        check_trace(net, graph, x)


def test_silent_layers_are_reported_as_unverified(x: Tensor) -> None:
    net = Net()
    net.lif.threshold = 1000.0
    assert check_trace(net, traced(net, x), x).unverified == {"lif": 0.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    class Two(nn.Module):
        def forward(self, frames: Tensor, scale: Tensor) -> Tensor:
            return frames * scale

    net = Two()
    inputs = {"frames": torch.ones(2, 3), "scale": torch.ones(2, 3)}
    graph = trace(net, inputs)
    inputs["scale"][0, 1] = bad
    with pytest.raises(VerifyError, match=r"example input\['scale'\] holds 1 values that are NaN or infinite"):
        check_trace(net, graph, inputs)


def test_a_module_that_returns_nan_is_not_compared() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x) / (x - x)

    x = torch.ones(2, 3)
    with pytest.raises(VerifyError, match="output 0 of the module itself holds NaN"):
        check_trace(Bad(), trace(Bad(), x), x)


def test_the_lowered_program_is_compared_too(x: Tensor) -> None:
    net, x = Net().double(), x.double()
    graph = traced(net, x)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    plan = decide(graph, tp=2, pp=1, dp="ddp", microbatches=1, pinned=None, profile=default_profile())
    compiled = lower(graph, plan, profile=default_profile())
    report = check_program(net, compiled, x)
    assert report.program is not None and report.program.output < 1e-12 and report.program.gradient < 1e-12
    for stage in compiled.stages.values():
        node = next(n for n in stage.graph.nodes if n.target in (ops.batch_norm, batch_norm_steps, batch_norm_repeated))
        node.args = (*node.args[:8], 0.3, *node.args[9:])
    with pytest.raises(VerifyError, match=r"Net, tp=2, pp=1: the lowered program differs from the module: output '0'"):
        check_program(net, compiled, x, report)


def test_tied_weights_and_unused_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    net, x = Tied(), torch.randn(3, 4)
    assert check_trace(net, trace(net, x), x).traced.gradient == 0


def test_nested_results_with_constants(x: Tensor) -> None:
    class Nested(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return {"logits": super().forward(x), "state": (None, [self.lif.mem, 3])}

    net = Nested()
    graph = trace(net, x)
    assert check_trace(net, graph, x).traced.output == 0
    graph.out_spec = pytree.tree_structure({"logits": 1, "state": (None, [1])})
    with pytest.raises(VerifyError, match="its result has another structure"):
        check_trace(net, graph, x)


def test_a_single_step_module_with_frames(x: Tensor) -> None:
    """`time_steps`: step t of the frames, outputs stacked over T."""
    net = nn.Sequential(nn.Linear(4, 6), SoftLIF())
    frames = torch.randn(5, 3, 4)
    graph = trace(net, frames, time_dims=1, time_steps=3)
    assert check_trace(net, graph, frames).traced.output == 0


def test_the_users_reset_is_used(x: Tensor) -> None:
    calls: list[nn.Module] = []

    class Sticky(Net):
        def clear(self) -> None:
            self.lif.mem = None

    def reset(model: nn.Module) -> None:
        calls.append(model)
        model.clear()  # type: ignore[operator]

    net = Sticky()
    net(x)
    graph = trace(net, x, reset=reset)
    calls.clear()
    check_trace(net, graph, x, reset=reset)
    assert calls == [net]


def test_float32_that_flips_spikes_is_decided_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ZOO["unet"].build()
    model, x = model.float(), x[0].float()
    graph = traced(model, x)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    compiled = lower(graph, decide(graph, tp=2, pp=1, profile=default_profile()), profile=default_profile())
    assert check_program(model, compiled, x).precision == "the network's own"
    monkeypatch.setitem(TOLERANCES, torch.float32, 0.0)
    report = check_program(model, compiled, x)
    assert report.precision == "float64"
    assert report.program is not None and report.program.gradient <= 1e-9
    monkeypatch.setitem(TOLERANCES, torch.float64, 0.0)
    with pytest.raises(VerifyError, match="the lowered program differs from the module"):
        check_program(model, compiled, x)


def test_a_module_that_fails_itself_is_named_with_its_line() -> None:
    snn = pytest.importorskip("snntorch")  # a layer that stays whole: the tracer knows what it returns without a call

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.lif = nn.Linear(4, 4), snn.RSynaptic(0.8, 0.9, all_to_all=False, reset_delay=False)

        def forward(self, x: Tensor) -> Tensor:
            spikes: Tensor = self.lif(self.fc(x))[0]
            return spikes

    net, x = Failing(), torch.randn(3, 4)
    with pytest.raises(TypeError):
        net(x)
    with pytest.raises(VerifyError, match="the module itself fails for the example inputs: TypeError") as error:
        check_trace(net, traced(net, x), x)
    assert "rsynaptic.py" in error.value.where and 'verify="off"' in error.value.fix


def test_the_random_numbers_of_gpus_are_left_alone(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    net = Net()
    check_trace(net, traced(net, x), x)
    assert not seeds


def test_neither_compiling_nor_launching_draws_random_numbers() -> None:
    """Here a surrogate draws at every step, which no node of the graph says."""
    snn = pytest.importorskip("snntorch")

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.lif = nn.Linear(4, 4), snn.Leaky(beta=0.9, spike_grad=snn.surrogate.SSO())

        def forward(self, x: Tensor) -> Tensor:
            spikes, membrane = self.lif(3.0 * self.fc(x))
            total = spikes
            for _ in range(3):
                spikes, membrane = self.lif(3.0 * self.fc(x), membrane)
                total = total + spikes
            return total

    net, x = Drawing(), torch.rand(3, 4)
    before = torch.get_rng_state()
    program = parallelize(net, example_inputs=x)
    assert torch.equal(torch.get_rng_state(), before)
    with program.launch(device="cpu"):
        assert torch.equal(torch.get_rng_state(), before)
