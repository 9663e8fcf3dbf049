"""A stage owns copies, makes its tensors on its device, and keeps what it reads of buffers it assigns."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from snnpart import ops
from snnpart.runtime.stage import Stage, localise
from tests.distributed.handmade import compile_by_hand, make_net


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
