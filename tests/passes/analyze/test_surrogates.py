"""The numbers that hand-written spike functions give, from the operations of their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from snnpart import facts
from snnpart.facts import Domain
from snnpart.ops import Surrogate
from snnpart.passes.analyze.surrogates import ANY, Bounds
from tests.lowering import analysed


class _Base(Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0], *(None,) * 3)[: ctx.count]


def made(forward: Any, count: int = 1) -> type[Function]:
    def run(ctx: Any, *args: Any) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(args[0])
        return forward(*args)

    return type("Made", (_Base,), {"forward": staticmethod(run)})


class Apart(Function):
    """The form with setup_context."""

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return torch.gt(u, 0).to(u.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def branch(u: Tensor) -> Tensor:
    return (u > 0).to(u) if u.sum() <= 0 else u


def in_place(u: Tensor) -> Tensor:
    out = (u > 0).to(u)
    out += u
    return out


def masked(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[u > 0] = 1
    return out


BIT, SIGN = (0.0, 1.0, True), (-1.0, 1.0, True)
FUNCTIONS: dict[str, tuple[Any, Bounds]] = {
    "compared and cast": (made(lambda u: (u >= 0).to(u)), BIT),
    "float": (made(lambda u: (u > 0.0).double()), BIT),
    "heaviside": (made(lambda u: torch.heaviside(u, torch.as_tensor([0.0]).to(u.dtype))), BIT),
    "heaviside of a half": (made(lambda u: torch.heaviside(u, torch.tensor(0.5, dtype=u.dtype))), (0.0, 1.0, False)),
    "where": (made(lambda u: torch.where(u > 0, 1.0, 0.0)), BIT),
    "both": (made(lambda u: (u > 0).double() * (u < 3).double()), BIT),
    "ternary": (made(lambda u: torch.sign(u)), SIGN),
    "integers": (made(lambda u: torch.round(torch.clamp(u, 0, 4))), (0.0, 4.0, True)),
    "integers by method": (made(lambda u: u.clamp(min=0, max=4).floor()), ANY[:2] + (True,)),
    "setup_context": (Apart, BIT),
    "scaled": (made(lambda u: (u > 0).double() * u), ANY),
    "branch": (made(branch), ANY),
    "in place": (made(in_place), ANY),
    "masked": (made(masked), ANY),
    "identity": (made(lambda u: u.clone()), ANY),
    "fails": (made(lambda u: torch.zeros(3) + torch.zeros(4)), ANY),
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_bounds(name: str) -> None:
    function, bounds = FUNCTIONS[name]
    assert found(function) == bounds


def found(function: type[Function]) -> Bounds:
    from snnpart.passes.analyze.surrogates import _bounds

    return _bounds(function, (((3, 4), torch.float64),), ())


def test_a_network_of_hand_written_spikes_has_domains() -> None:
    """Spikes, and their sums over a residual."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            one: Tensor = Apart.apply(self.a(x))
            two: Tensor = Apart.apply(self.b(one))
            return one + two

    graph = analysed(Net().double(), (torch.randn(2, 3, dtype=torch.float64),))
    spikes = [n for n in graph.graph.nodes if isinstance(n.target, Surrogate)]
    assert [facts.need(n, Domain).kind for n in spikes] == ["spike", "spike"]
    total = next(n for n in graph.graph.nodes if n.target is torch.add)
    assert facts.need(total, Domain) == Domain("integer", 0.0, 2.0)
