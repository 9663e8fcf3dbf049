"""The traps of design.md section 4, and the cases of the casebook that concern tracing."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import ops
from snnpart.errors import ConfigError, TraceError
from snnpart.trace import trace
from tests.neurons import LIF, Spike, data, fill
from tests.trace.parity import check, compare

Constants = namedtuple("Constants", "tau vth")


class Cell(nn.Module):
    """A03: constants in a NamedTuple, one of them trained."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 6)
        self.p = Constants(torch.tensor(0.4, dtype=torch.float64, requires_grad=True), torch.tensor(0.3).double())

    def forward(self, xs: Tensor) -> Tensor:
        v, outs = torch.zeros(xs.shape[1], 6, dtype=torch.float64), []
        for x in xs:
            v = v + (self.l(x) - v) * self.p.tau
            z = Spike.apply(v - self.p.vth)
            v = v * (1 - z.detach())
            outs.append(z)
        return torch.stack(outs)


def test_a03_tensors_in_a_named_tuple() -> None:
    model = fill(Cell(), scale=0.5)
    graph = check(model, data(5, 4, 4), in_dims=1, others=data(5, 7, 4))
    tau = graph.tensors["p.tau"]
    assert (tau.kind, tau.registered, tau.tensor is model.p.tau) == ("parameter", False, True)
    assert graph.tensors["p.vth"].kind == "constant"
    model.p.tau.grad = None
    model(data(5, 4, 4)).mul(data(5, 4, 6, k=0.2)).sum().backward()
    torch.testing.assert_close(model.p.tau.grad.item(), 1.5340358873959752, rtol=1e-7, atol=0)


class Dropping(nn.Module):
    """A18: surrogate, loop over a size, state that begins as a float, dropout with self.training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        v = out = 0.0
        for t in range(x.shape[1]):
            v = 0.5 * v + self.a(x[:, t])
            z = Spike.apply(v - 0.4)
            v = v * (1 - z.detach())
            out = out + self.b(F.dropout(z, 0.5, self.training))
        return out / x.shape[1]


@pytest.mark.parametrize("steps", [5, 7])
@pytest.mark.parametrize("training", [True, False])
def test_a18_one_graph_for_both_modes_and_all_batches(steps: int, training: bool) -> None:
    graph = check(fill(Dropping()), data(3, steps, 4) * 2, training=training, others=data(8, steps, 4))
    assert not graph.training_specialised and graph.outputs[0].batch_dim == 0


class Branching(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            out = out * 2
        return out


@pytest.mark.parametrize("training", [True, False])
def test_a_branch_on_training_specialises_and_says_where(training: bool) -> None:
    graph = check(fill(Branching()), data(3, 4, 4), training=training)
    assert graph.training_specialised and graph.traced_training is training
    (found,) = [a for a in graph.assumptions if a.kind == "branch"]
    assert "self.training" in found.text and "test_traps.py" in found.place


class BNTT(nn.Module):
    """A21: a Python counter picks the BatchNorm of the step."""

    def __init__(self, c: int, steps: int) -> None:
        super().__init__()
        self.bn = nn.ModuleList(nn.BatchNorm1d(c) for _ in range(steps))
        self.t = 0

    def reset(self) -> None:
        self.t = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn[self.t](x)
        self.t += 1
        return y


def test_a21_a_batch_norm_for_every_step() -> None:
    model = fill(BNTT(3, 4))
    graph = check(model, data(4, 6, 3) * 2, in_dims=1, time_dims=0, time_steps=4, reset=BNTT.reset)
    means = [node.args[3].target for node in graph.graph.nodes if node.target is ops.batch_norm]
    assert means == [f"bn.{t}.running_mean" for t in range(4)]
    assert [(s.module, s.name, s.initial) for s in graph.states] == [("", "t", "0")]
    assert model.t == 0


def test_a24_a_model_that_was_just_run() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 6), LIF(), nn.Linear(6, 3)), scale=0.5)
    model(data(5, 4))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    held = model[1].v
    graph = trace(model, data(5, 4))
    assert model[1].v is held and held.grad_fn is not None
    compare(graph, model, data(5, 4), training=True)


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = x * 0.5 if self.state is None else self.state + x
        return self.state


def test_state_that_cannot_be_reset_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stubborn())
    model(torch.ones(2, 4))
    with pytest.raises(TraceError, match=r"'1.state' holds a tensor of an earlier forward") as caught:
        trace(model, torch.ones(2, 4))
    assert "module '1'" in str(caught.value) and "self.state + x" in str(caught.value) and "reset=" in str(caught.value)

    def forget(m: nn.Module) -> None:
        m[1].state = None

    check(model, torch.ones(2, 4), reset=forget)


def test_state_left_by_a_forward_without_gradients_is_named() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 4), Stubborn()))
    with torch.no_grad():
        model(data(3, 4))
    with pytest.raises(TraceError, match=r"'state' holds a tensor\[3, 4\] of an earlier forward") as caught:
        trace(model, data(3, 4))
    assert "module '1'" in str(caught.value) and "reset=" in str(caught.value)


def reset(model: nn.Module) -> None:
    for child in model.modules():
        if isinstance(child, LIF):
            child.reset()


class BatchFirst(nn.Module):
    """A26: [N, T, C] in, [T, N, C] out, and a reset inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(3, 4), LIF(vth=0.4)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        x = x.permute(1, 0, 2)
        return torch.stack([self.n(self.l(x[t])) for t in range(x.shape[0])])


@pytest.mark.parametrize("batch", [6, 4, 1])
def test_a26_the_batch_is_not_axis_0_of_the_output(batch: int) -> None:
    graph = check(fill(BatchFirst()), data(batch, 4, 3) * 2, others=data(5, 4, 3))
    assert graph.outputs[0].batch_dim == 1 and graph.batch == batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.l, self.n = nn.LayerNorm(4), nn.Linear(4, 4), LIF()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.n(self.l(x))


def test_a28_parameters_that_are_never_used() -> None:
    model = fill(nn.Sequential(Block(), Block(), nn.Linear(4, 2)), scale=0.5)
    graph = check(model, data(5, 4))
    unused = sorted(name for name, info in graph.tensors.items() if not info.used)
    assert unused == ["0.norm.bias", "0.norm.weight", "1.norm.bias", "1.norm.weight"]
    assert set(graph.tensors) == set(model.state_dict())


class DataBranch(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x if self.ask(x) else -x


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.any(),
        lambda x: x.sum() > 0,
        lambda x: x.sum().item(),
        lambda x: int(x.sum()),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.detach().numpy(),
        lambda x: x.nonzero().shape[0],
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0].shape[0],
    ],
)
def test_a_branch_on_data_names_the_users_line(ask: Any) -> None:
    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(nn.Linear(4, 4), DataBranch(ask)), torch.ones(2, 4))
    text = str(caught.value)
    assert "module '1'" in text and "test_traps.py:" in text and ("lambda x:" in text or "if self.ask(x)" in text)
    assert "torch.where" in text


def test_a_module_that_fails_names_module_line_and_error() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3, 1000)

    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(nn.Linear(4, 4), Broken()), torch.ones(2, 4))
    text = str(caught.value)
    assert "module '1'" in text and "x.reshape(3, 1000)" in text and "RuntimeError" in text


def test_not_a_module() -> None:
    with pytest.raises(ConfigError, match="model is a function"):
        trace(lambda x: x, torch.ones(2))  # type: ignore[arg-type]


def test_a_network_without_neurons_is_traced_and_says_so() -> None:
    graph = check(fill(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), data(2, 4), others=data(5, 4))
    assert [a.text for a in graph.assumptions if a.kind == "neuron"] == ["no spiking neuron was found"]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.l, self.n, self.out, self.reentrant = nn.Linear(4, 6), LIF(), nn.Linear(6, 3), reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.n(self.l(x))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        first = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.out(first + checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_advances_the_state_once_a_call(reentrant: bool) -> None:
    """Eager advances it twice; the right value is that of the network without checkpoint."""
    x = data(5, 4).requires_grad_()
    model = fill(Checkpointed(reentrant), scale=0.5)
    graph = trace(model, x)
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.out(plain.body(x) + plain.body(x))  # type: ignore[method-assign]
    graph.tensors.update({name: _moved(info, plain) for name, info in graph.tensors.items()})
    compare(graph, plain, x, training=True)
    assert [a.kind for a in graph.assumptions] == ["checkpoint"]
    assert not [node for node in graph.graph.nodes if "checkpoint" in getattr(node.target, "__module__", "")]


def _moved(info: Any, model: nn.Module) -> Any:
    from dataclasses import replace

    return replace(info, tensor=model.get_parameter(info.name))
