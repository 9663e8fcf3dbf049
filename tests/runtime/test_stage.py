"""A stage owns copies, makes its tensors on its device, and keeps what it reads of buffers it assigns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import ops
from snnpart.errors import LaunchError
from snnpart.runtime.localise import localise
from snnpart.runtime.stage import Stage
from tests.distributed.handmade import compile_by_hand, make_net
from tests.lowering import compiled as lowered
from tests.lowering import fire


class Steps(nn.Module):
    """Two steps of a network that returns its state."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        first, state = self.net(x, None)
        second, _ = self.net(x, state)
        total: Tensor = first + second
        return total


def test_the_users_tensors_are_only_read() -> None:
    net = make_net()
    compiled = compile_by_hand(net, tp=2)
    values = {name: info.tensor for name, info in compiled.source.tensors.items()}
    stage = Stage([compiled.stage(0, 1)], values, torch.device("cpu"))
    with torch.no_grad():
        for _, parameter in stage.parameters():
            parameter.fill_(9.0)
        for _, buffer in stage.buffers():
            buffer.zero_()
    for name, value in make_net().state_dict().items():
        assert torch.equal(net.state_dict()[name], value)
    assert stage.tensor("a.weight").shape == (3, 6)
    assert {name for name, _ in stage.parameters()} == {name for name, _ in net.named_parameters()}


def test_numbers_that_two_leaves_share_are_on_the_device_in_both() -> None:
    """Norse's cells share one default set of numbers, plain tensors; only the first cell names them."""
    norse = pytest.importorskip("norse.torch")
    net = norse.SequentialState(nn.Linear(4, 5), norse.LIFCell(), nn.Linear(5, 3), norse.LIFCell())
    program = lowered(Steps(net), torch.rand(3, 4))
    values = {name: info.tensor for name, info in program.source.tensors.items()}
    stage = Stage([program.stage(0, 0)], values, torch.device("meta"))
    found = {path: [x.device.type for _, x in leaf.named_buffers()] for path, leaf in stage.leaves.items()}
    assert len(found) == 2 and all(types and set(types) == {"meta"} for types in found.values())


def test_literal_devices_become_the_stage_s() -> None:
    graph = fx.Graph()
    made = graph.call_function(torch.zeros, (2,), {"device": torch.device("cpu")})
    moved = graph.call_method("to", (made, torch.device("cpu")))
    named = graph.call_function(torch.zeros, (2,), {"device": "cpu"})
    graph.output((moved, named))
    local = localise(graph, torch.device("meta"))
    values: Any = fx.GraphModule(torch.nn.Module(), local)()
    assert [value.device.type for value in values] == ["meta", "meta"]
    assert made.kwargs["device"].type == "cpu"


def test_a_buffer_that_is_assigned_may_be_saved_for_backward() -> None:
    """`self.v = new` after `x * self.v`: backward needs the old value, and the next microbatch comes before it."""
    graph = fx.Graph()
    x, v = graph.placeholder("x"), graph.get_attr("v")
    y = graph.call_function(torch.mul, (x, v))
    graph.call_function(ops.assign, (v, graph.call_function(torch.add, (v, 1.0))))
    graph.output((y,))
    root = torch.nn.Module()
    root.register_buffer("v", torch.tensor(2.0))
    module = fx.GraphModule(root, localise(graph, torch.device("cpu")))
    x1, x2 = (torch.tensor(3.0, requires_grad=True) for _ in range(2))
    (first,), (second,) = module(x1), module(x2)
    (first + second).backward()
    assert (x1.grad, x2.grad) == (torch.tensor(2.0), torch.tensor(3.0))
    assert root.v.item() == 4.0


class Scaled(nn.Module):
    """In eval its results are scaled by a tensor that it did not register, or by a buffer."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.stride = torch.linspace(1, 3, 3, dtype=torch.float64)
        if registered:
            del self.stride
            self.register_buffer("stride", torch.linspace(1, 3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(fire(self.a(x)))
        return out if self.training else out * self.stride


@pytest.mark.parametrize("registered", [False, True])
def test_an_unregistered_tensor_that_only_eval_reads_is_held_when_its_graph_is_bound(registered: bool) -> None:
    module, x = Scaled(registered).double(), torch.randn(4, 4, dtype=torch.float64)
    trained = lowered(module, (x,))
    assert ("stride" in trained.source.tensors) is registered
    evaluated = lowered(module, (x,), pinned=trained.plan, training=False)
    values = {name: info.tensor for name, info in trained.source.tensors.items()}
    stage = Stage([trained.stage(0, 0)], values, torch.device("cpu"))
    stage.bind(trained, 0)
    bound = stage.bind(evaluated, 0)[0]
    (out,) = stage.forward(bound, (x,), (), 4)
    torch.testing.assert_close(out, module.eval()(x))
    assert stage.tensor("stride") is not (module.stride)


def test_a_constant_of_the_launched_network_is_not_taken_again_elsewhere() -> None:
    module, inputs = Scaled(False).double(), (torch.randn(4, 4, dtype=torch.float64),)
    evaluated = lowered(module, inputs, training=False, pp=2, pinned=None)
    values = {name: info.tensor for name, info in evaluated.source.tensors.items()}
    stage = Stage([evaluated.stage(0, 0)], values, torch.device("cpu"))
    stage.bind(evaluated, 0)
    assert "stride" not in stage.slices
    moved = lowered(module, inputs, training=False)
    with pytest.raises(LaunchError, match="'stride'.* lie elsewhere"):
        stage.bind(moved, 0)
