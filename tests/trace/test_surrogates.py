"""autograd.Function in every style: one node each, with the user's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, ops
from snnpart.errors import TraceError
from snnpart.facts import Value
from snnpart.graph import SpikeGraph
from snnpart.trace import trace
from tests.neurons import Spike, data, fill
from tests.trace.parity import check

early = Spike.apply


class Separate(torch.autograd.Function):
    """setup_context style, with a number beside the tensor."""

    @staticmethod
    def forward(u: Tensor, width: float) -> Tensor:
        return (u >= 0).to(u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        u, ctx.width = inputs
        ctx.save_for_backward(u)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (u,) = ctx.saved_tensors
        return grad * torch.exp(-ctx.width * u * u), None


class Narrow(Spike):
    """Inherits forward, has a backward of its own."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad * (u.abs() < 0.5).to(u)


class Learned(torch.autograd.Function):
    """Two tensors in, one of them a parameter; two results, one without gradient."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(u, slope)
        fired = u >= 0
        ctx.mark_non_differentiable(fired)
        return fired.to(u), fired

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        u, slope = ctx.saved_tensors
        peak = 1 / (1 + (slope * u) ** 2)
        return grad * peak, (grad * peak * u).sum()


class Firing(nn.Module):
    def __init__(self, fire: Callable[..., Tensor]) -> None:
        super().__init__()
        self.l, self.out, self.fire = nn.Linear(4, 6), nn.Linear(6, 3), fire
        self.slope = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fire(self.l(x) - 0.1))


class WithSlope(Firing):
    def forward(self, x: Tensor) -> Tensor:
        spikes, fired = Learned.apply(self.l(x), self.slope)
        return self.out(spikes) + fired.sum(1, keepdim=True)


def surrogates(graph: SpikeGraph) -> list[type]:
    return [node.target.function for node in graph.graph.nodes if isinstance(node.target, ops.Surrogate)]


@pytest.mark.parametrize(
    ("fire", "cls"),
    [
        (early, Spike),
        (lambda u: Spike.apply(u), Spike),
        (lambda u: Separate.apply(u, 3.0), Separate),
        (lambda u: Narrow.apply(u), Narrow),
    ],
    ids=["bound early", "ctx", "setup_context", "inherited"],
)
def test_the_gradient_is_the_users_own(fire: Callable[..., Tensor], cls: type) -> None:
    model = fill(Firing(fire))
    graph = check(model, data(5, 4), others=data(8, 4))
    assert surrogates(graph) == [cls]
    check_gradient_passes(model)


def check_gradient_passes(model: nn.Module) -> None:
    model.zero_grad()
    model(data(5, 4)).sum().backward()
    assert model.l.weight.grad is not None and model.l.weight.grad.abs().sum() > 0


def test_several_inputs_and_results() -> None:
    graph = check(fill(WithSlope(early)), data(5, 4))
    assert surrogates(graph) == [Learned]


def test_a_class_made_while_tracing() -> None:
    def fire(u: Tensor) -> Tensor:
        class Local(Spike):
            pass

        return Local.apply(u)

    graph = trace(fill(Firing(fire)), data(5, 4))
    assert [cls.__name__ for cls in surrogates(graph)] == ["Local"]
    assert "the batch size is fixed" in graph.assumptions[0].text  # another class at every call


class Quiet(Firing):
    def forward(self, x: Tensor) -> Tensor:
        u = self.l(x)
        with torch.no_grad():
            gate = self.fire(u)
        return self.out(self.fire(u) * gate)


def test_apply_under_no_grad_is_detached() -> None:
    graph = check(fill(Quiet(early)), data(5, 4))
    first = next(node for node in graph.graph.nodes if isinstance(node.target, ops.Surrogate))
    (cut,) = first.users
    assert cut.target is torch.detach and not facts.need(cut, Value).requires_grad


class GivesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class WritesInput(GivesInput):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.mark_dirty(u)
        return u.add_(1)


def test_a_function_that_gives_its_input_back() -> None:
    check(fill(Firing(lambda u: GivesInput.apply(u) + u)), data(5, 4))


def test_a_function_that_writes_into_its_input_is_refused() -> None:
    with pytest.raises(TraceError, match=r"WritesInput.forward writes into its inputs"):
        trace(fill(Firing(lambda u: WritesInput.apply(u * 1))), data(5, 4))


STASH: list[Tensor] = []


class Stashes(Spike):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        STASH[:] = [u * 2]
        return Spike.forward(ctx, u)


def test_a_tensor_smuggled_out_of_a_function_is_refused() -> None:
    with pytest.raises(TraceError, match="made by something the tracer cannot see") as caught:
        trace(fill(Firing(lambda u: Stashes.apply(u) + STASH[0])), data(5, 4))
    assert "shape (5, 6)" in str(caught.value) and "STASH[0]" in str(caught.value)


def test_classes_are_as_before_also_after_a_failure() -> None:
    kept = [(cls, dict(vars(cls))) for cls in (Spike, Separate, Narrow, Learned)]

    def fail(u: Tensor) -> Tensor:
        raise KeyError("mine")

    trace(fill(Firing(early)), data(5, 4))
    with pytest.raises(TraceError, match="KeyError: 'mine'"):
        trace(fill(Firing(fail)), data(5, 4))
    for cls, before in kept:
        assert dict(vars(cls)) == before
    assert torch.equal(Spike.apply(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
