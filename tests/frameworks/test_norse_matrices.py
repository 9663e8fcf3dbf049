"""Norse's layers with matrices: leaves on one rank, traced through where tp ranks share the matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import load, parallelize, simulate
from snnpart.api import ParallelProgram
from snnpart.passes.decide.constraints import WRITTEN_OUT
from tests.lowering import assert_gradients, near

norse = pytest.importorskip("norse.torch")


def fast(kind: Any) -> Any:
    """Parameters with which membranes move within a few steps."""
    return kind(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0))


class Frames(nn.Module):
    """A layer that is called once for all steps, or once a step, between two linear ones."""

    def __init__(self, layer: Callable[[], nn.Module], loops: bool) -> None:
        super().__init__()
        self.fc, self.cell, self.out, self.loops = nn.Linear(4, 6), layer(), nn.Linear(7, 3), loops

    def forward(self, x: Tensor) -> Tensor:
        x = 4 * self.fc(x)
        if not self.loops:
            return self.out(self.cell(x)[0])
        state, record = None, []
        for frame in x:
            spikes, state = self.cell(frame, state)
            record.append(self.out(spikes))
        return torch.stack(record)


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "LIF": (lambda: norse.LIFRecurrentCell(6, 7, p=fast(norse.LIFParameters)), True),
    "LIF with autapses": (lambda: norse.LIFRecurrentCell(6, 7, p=fast(norse.LIFParameters), autapses=True), True),
    "LSNN": (lambda: norse.LSNNRecurrentCell(6, 7, p=fast(norse.LSNNParameters)), True),
    "refractory": (lambda: norse.LIFRefracRecurrentCell(6, 7), True),
    "readout": (lambda: norse.LILinearCell(6, 7), True),
    "LIF, all steps": (lambda: norse.LIFRecurrent(6, 7, p=fast(norse.LIFParameters)), False),
    "LSNN, all steps": (lambda: norse.LSNNRecurrent(6, 7, p=fast(norse.LSNNParameters)), False),
}


def made(name: str, steps: int = 5, **how: Any) -> tuple[Frames, Tensor, ParallelProgram]:
    torch.manual_seed(0)
    net = Frames(*LAYERS[name]).double()
    with torch.no_grad():
        net.cell.get_parameter("input_weights").mul_(8)
    x = torch.rand(steps, 3, 4, dtype=torch.float64) * 2
    return net, x, parallelize(net, example_inputs=x, in_dims=1, **how)


def assert_same(net: Frames, x: Tensor, program: ParallelProgram) -> Any:
    """The net itself (a deep copy of a parameter has no hooks) and the simulated ranks; the gradients of the ranks."""
    ran, got = net(x), simulate.run(program.compiled, (x,), training=True)
    for output in (ran, got.outputs[0]):
        (output * torch.cos(torch.arange(output.numel()).reshape(output.shape))).sum().backward()
    near(ran, got.outputs[0], "output")
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
    assert_gradients(net, got.gradients())
    return got.gradients()


def fires(net: Frames, x: Tensor) -> bool:
    rates: list[float] = []
    hook = net.cell.register_forward_hook(lambda module, given, out: rates.append(float(out[0].detach().mean())))
    net(x)
    hook.remove()
    return 0.01 < sum(rates) / len(rates) < 0.99


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_every_matrix_is_shared(name: str, tp: int) -> None:
    net, x, program = made(name, tp=tp)
    cut = {part.name for part in program.compiled.stage(0, 0).tensors if part.dim is not None}
    assert {n for n, p in net.cell.named_parameters() if p.dim() == 2} == {
        n.removeprefix("cell.") for n in cut if n.startswith("cell.")
    }
    assert "cell" not in program.compiled.source.leaves
    assert name == "readout" or fires(net, x)
    gradients = assert_same(net, x, program)
    if "recurrent_weights" in dict(net.cell.named_parameters()):
        assert bool(gradients["cell.recurrent_weights"].diagonal().any()) is (name == "LIF with autapses")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"pp": 2},
        {"tp": 2, "shard": "time"},
        {"tp": 2, "shard": {"cell": "replicate"}},
        {"tp": 2, "steps": WRITTEN_OUT + 1},
    ],
)
@pytest.mark.parametrize("name", ["LSNN", "LIF, all steps"])
def test_a_layer_stays_a_leaf_where_its_matrices_are_not_to_be_shared(name: str, how: dict[str, Any]) -> None:
    net, x, program = made(name, **how)
    assert set(program.compiled.source.leaves) == {"cell"}
    if "steps" not in how:
        assert_same(net, x, program)


def test_the_plan_says_whether_a_layer_is_traced_through() -> None:
    """For another number of steps too."""
    _, _, shared = made("LSNN", tp=2)
    _, _, whole = made("LSNN", tp=2, shard="time")
    net, x, again = made("LSNN", tp=2, plan=shared.plan, steps=7)
    assert again.plan.shards["cell"] == shared.plan.shards["cell"] and not again.compiled.source.leaves
    assert_same(net, x, again)
    _, _, kept = made("LSNN", tp=2, plan=whole.plan)
    assert set(kept.compiled.source.leaves) == {"cell"}


def test_a_saved_program_keeps_the_diagonal_at_zero(tmp_path: Path) -> None:
    net, x, program = made("LIF", tp=2)
    program.save(tmp_path / "p")
    read = load(tmp_path / "p")
    got = simulate.run(read.compiled, (x,), training=True)
    got.outputs[0].sum().backward()
    gradient: Any = got.gradients()["cell.recurrent_weights"]
    assert not gradient.diagonal().any() and gradient.any()
