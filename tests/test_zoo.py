"""Every network of the zoo traces to a graph that computes what the network computes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from snnpart.frameworks import reset_state
from snnpart.gate import check_trace
from snnpart.trace import trace
from tests.calibrate import rates, silent
from tests.margin import MARGIN, margin
from tests.zoo import ZOO, every


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", every())
def test_traced_graph_equals_the_network(name: str) -> None:
    model = ZOO[name]
    module, inputs = model.build()
    assert not silent(rates(module, lambda: model.call(module, inputs)))
    reset_state(module)
    before = state_of(module)
    graph = trace(module, inputs, **model.dims)
    report = check_trace(module, graph, inputs)
    assert not report.unverified
    assert report.traced.output == report.traced.gradient == report.traced.buffer == report.traced.flips == 0
    assert all(info.used for info in graph.tensors.values() if info.kind == "parameter")
    after = state_of(module)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", every())
def test_every_used_parameter_has_a_gradient(name: str) -> None:
    model = ZOO[name]
    module, inputs = model.build()
    outputs = model.call(module, inputs)
    loss = sum((o * torch.randn_like(o)).sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))
    loss.backward()  # type: ignore[union-attr]
    without = [n for n, p in module.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not without


@pytest.mark.parametrize("name", ["small_sew-m", "snntorch_hidden", "norse_lsnn", "handwritten_lif"])
def test_the_program_holds_for_other_batch_sizes(name: str) -> None:
    """The graph made at one batch size computes what the network computes at another."""
    if name not in ZOO:
        pytest.skip("framework not installed")
    model = ZOO[name]
    module, inputs = model.build()
    graph = trace(module, inputs, **model.dims)
    assert graph.batch_fixed == ""
    other = tuple(torch.cat([x, x.flip(model.in_dims), x], model.in_dims) for x in inputs)
    assert check_trace(module, graph, other).traced.output == 0


def test_building_twice_gives_the_same_network() -> None:
    (one, x), (two, y) = ZOO["unet"].build(), ZOO["unet"].build()
    assert torch.equal(x[0], y[0])
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", [name for name, model in ZOO.items() if model.dtype == torch.float32])
def test_in_float32_no_membrane_is_near_its_threshold(name: str) -> None:
    """Then a sum in another order flips no spike, and parity to 1e-5 means something."""
    model = ZOO[name]
    module, inputs = model.build()
    assert MARGIN < margin(lambda: model.call(module, inputs)) < 1.0
