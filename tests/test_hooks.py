"""Gradient hooks of the user's parameters under tp, on slices, and in saved programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import artifact, hooks, parallelize, simulate
from snnpart.errors import CheckpointError, PlanError
from snnpart.frameworks import reset_state
from snnpart.passes.decide import table
from snnpart.program import CompiledProgram
from tests.lowering import assert_gradients, near
from tests.neurons import LIF, data, fill

WHOLE = "has a gradient hook, which expects the whole gradient"
KEEP = r"to mend it: .*keep the layer whole: shard=\{\"a\": \"replicate\"\}"


def shortened(gradient: Tensor) -> Tensor:
    """The gradient at length one: every element depends on all."""
    return gradient / gradient.norm()


def no_diagonal(gradient: Tensor) -> Tensor:
    return gradient.clone().fill_diagonal_(0.0)


class Scaled(nn.Module):
    """Two layers with a neuron between them, and one learned factor for all its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(4, 6), LIF(), nn.Linear(6, 3)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        self.n.v = None
        return self.b(self.n(self.factor * self.a(x)))

    def halved(self, gradient: Tensor) -> Tensor:
        return gradient / 2


def hooked(name: str) -> Any:
    net: Any = fill(Scaled())
    net.get_parameter(name).register_hook(shortened)
    return net


def assert_same(net: nn.Module, x: Tensor, program: CompiledProgram) -> None:
    """Output and gradients of the net itself (a deep copy of a parameter has no hooks) and of the simulated ranks."""
    ran, got = net(x), simulate.run(program, (x,), training=True)
    for output in (ran, got.outputs[0]):
        (output * data(*ran.shape)).sum().backward()
    near(ran, got.outputs[0], "output")
    assert_gradients(net, got.gradients())
    net.zero_grad()


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "b.bias", "factor"])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_hook_sees_the_whole_gradient_of_a_layer_that_stays_whole(name: str, tp: int) -> None:
    net, x = hooked(name), data(5, 4) * 2
    program = parallelize(net, tp=tp, example_inputs=x)
    assert_same(net, x, program.compiled)
    cut = {part.name for part in program.compiled.stage(0, 0).tensors if part.dim is not None or part.partial_gradient}
    assert name not in cut and cut & {"a.weight", "b.weight"}


def test_why_and_refusals_name_the_hook() -> None:
    net, x = hooked("a.weight"), data(5, 4) * 2
    assert f"'a.weight' {WHOLE}" in str(parallelize(net, tp=2, example_inputs=x).report().why("a"))
    with pytest.raises(PlanError, match=rf"'a.weight' {WHOLE}(.|\n)*" + KEEP):
        parallelize(net, tp=2, example_inputs=x, shard={"a": "column"})


def test_a_placement_that_overlooked_a_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_hooked", lambda node, found, ask: found)
    with pytest.raises(PlanError, match=rf"'a.weight' {WHOLE}; a tp rank has a part of it(.|\n)*" + KEEP):
        parallelize(hooked("a.weight"), tp=2, example_inputs=data(5, 4) * 2, shard={"a": "column"})


class Tied(nn.Module):
    """The network's own name for the number that a neuron layer learns."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron

        self.a, self.n = nn.Linear(4, 6), neuron.ParametricLIFNode(v_threshold=0.2, step_mode="m")
        self.b, self.w = nn.Linear(6, 3), self.n.w

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.n(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_a_number_that_layer_and_network_name_goes_through_its_hook_once(how: dict[str, Any]) -> None:
    pytest.importorskip("spikingjelly")
    net = fill(Tied())
    net.w.register_hook(lambda gradient: 3 * gradient)  # type: ignore[union-attr, operator]
    program = parallelize(net, example_inputs=data(5, 2, 4), input_layout="TNC", **how)
    with parallelize(net, example_inputs=data(5, 2, 4), input_layout="TNC").launch() as running:
        running.train_step(data(5, 2, 4), torch.zeros(2), lambda out, _: out.square().sum())
        found = running.gradients()["w"]
    reset_state(net)
    net(data(5, 2, 4)).square().sum().backward()
    assert program.compiled.source.tensors["w"].aliases == ("n.w",)
    assert net.w.grad is not None and float(net.w.grad) != 0
    torch.testing.assert_close(found, net.w.grad, rtol=1e-9, atol=1e-12)


def test_a_layer_of_a_framework_whose_own_number_has_a_hook_stays_whole() -> None:
    """Its channels lie on the ranks, and the number's gradient is a sum over them."""
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    functional = pytest.importorskip("spikingjelly.activation_based.functional")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), neuron.ParametricLIFNode(step_mode="m"), nn.Linear(6, 4)]
    net: Any = nn.Sequential(*layers).double()
    x = torch.rand(3, 5, 4, dtype=torch.float64) * 4
    net[1].w.register_hook(lambda gradient: gradient * gradient.abs())
    program = parallelize(net, tp=2, example_inputs=x, input_layout="TNC")
    assert f"'1.w' {WHOLE}" in str(program.report().why("1"))
    assert {part.name for part in program.compiled.stage(0, 0).tensors if part.dim is not None} >= {"0.weight"}
    functional.reset_net(net)
    assert_same(net, x, program.compiled)
    with pytest.raises(PlanError, match=rf"'1.w' {WHOLE}(.|\n)*" + KEEP.replace("a\\", "1\\")):
        parallelize(net, tp=2, example_inputs=x, input_layout="TNC", shard={"1": "shard"})


@pytest.mark.parametrize(("dim", "pieces"), [(0, ((1, 3),)), (1, ((0, 1), (3, 4))), (1, ())])
def test_a_hook_on_a_slice_knows_its_place(dim: int, pieces: Any) -> None:
    whole = nn.Parameter(data(5, 4))
    whole.register_hook(no_diagonal)
    factor = data(5, 4) + 3
    (whole * factor).sum().backward()
    take = lambda x: torch.cat([x[:0] if dim == 0 else x[:, :0]] + [x.narrow(dim, a, b - a) for a, b in pieces], dim)  # noqa: E731
    part = nn.Parameter(take(whole.detach()))
    hooks.carry(whole, part, dim, pieces)
    (part * take(factor)).sum().backward()
    assert whole.grad is not None and part.grad is not None
    assert not whole.grad.diagonal().any() and whole.grad.any()
    assert torch.equal(part.grad, take(whole.grad))


def test_hooks_without_a_result_leave_the_gradient() -> None:
    seen: list[Tensor] = []
    whole, part = nn.Parameter(data(4)), nn.Parameter(data(4)[:2])
    whole.register_hook(seen.append)
    hooks.carry(whole, part, 0, ((0, 2),))
    part.square().sum().backward()
    assert torch.equal(part.grad, 2 * part.detach())  # type: ignore[arg-type]
    assert torch.equal(seen[0], torch.cat([2 * part.detach(), torch.zeros(2, dtype=torch.float64)]))


def test_a_saved_program_keeps_the_hooks(tmp_path: Path) -> None:
    net, x = hooked("a.weight"), data(5, 4) * 2
    artifact.save(parallelize(net, example_inputs=x).compiled, tmp_path / "p")
    assert_same(net, x, artifact.load(tmp_path / "p"))


def test_a_hook_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    net: Any = fill(Scaled())
    net.a.weight.register_hook(net.halved)
    compiled = parallelize(net, example_inputs=data(5, 4) * 2).compiled
    with pytest.raises(CheckpointError, match=r"gradient hook: 'a.weight' is a module \(Scaled\)"):
        artifact.save(compiled, tmp_path / "p")
    assert not (tmp_path / "p").exists()
