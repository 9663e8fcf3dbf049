"""A backward in halves is the whole one: the same gradients, each accumulated once, and few of them at one time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.live_bytes import LiveBytes
from snnpart.runtime.split_backward import Halves

Weights = dict[str, Tensor]
Net = Callable[[Tensor, Weights], tuple[Tensor, ...]]


def chain(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    return (torch.tanh(x @ w["a"] + w["d"]) @ w["b"],)


def standardised(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """The weights' side has operations of its own, and one weight is read there and by a gate."""
    return (torch.tanh(x @ (w["a"] - w["a"].mean(0))) @ w["b"] + x @ w["a"],)


def twice(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """As in a layer that is kept whole: two parallel operations read one weight."""
    return (torch.tanh(x) @ w["a"] + torch.sin(x) @ w["a"] + w["d"],)


def squared(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """One operation off the weights' side, and one beside it, read a weight at two places."""
    return (torch.addmm(w["a"], x, w["a"]) @ w["b"] + w["b"],)


def sent_on(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """The stage also sends something that it made of weights alone."""
    turned = w["a"].t()
    return torch.tanh(x @ turned) @ w["b"], turned


def in_a_loop(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """Cannot be split."""
    return (torch.tanh(torch.tanh(x @ w["a"]) @ w["a"]) @ w["b"],)


NETS: Sequence[Net] = (chain, standardised, twice, squared, sent_on, in_a_loop)


def weights() -> Weights:
    drawn = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 4), "b": (4, 4), "d": (4,)}
    return {n: torch.randn(s, generator=drawn, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}


def received(number: int) -> Tensor:
    drawn = torch.Generator().manual_seed(1 + number)
    return torch.randn((4, 4), generator=drawn, dtype=torch.float64).requires_grad_()


def whole(roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    torch.autograd.backward(list(roots), list(grads))


def arriving(outs: Sequence[Tensor]) -> list[Tensor]:
    return [F.silu(out.detach()) for out in outs]


def in_halves(outs: Sequence[Tensor], x: Tensor) -> Halves:
    """After the first half."""
    halves = Halves(outs, arriving(outs), [x])
    halves.inputs(whole)
    return halves


@pytest.mark.parametrize("net", NETS)
def test_gradients_are_those_of_a_whole_backward(net: Net) -> None:
    """Over two microbatches, the second halves after both first ones."""
    want, found = weights(), weights()
    waiting = []
    for number in range(2):
        x, y = received(number), received(number)
        outs = net(x, want)
        whole(outs, arriving(outs))
        waiting.append(in_halves(net(y, found), y))
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
        assert x.grad is not None and float(x.grad.abs().max()) > 0
    for halves in waiting:
        halves.weights()
    for name, weight in want.items():
        torch.testing.assert_close(found[name].grad, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("net", NETS)
def test_a_parameter_gets_its_gradient_once(net: Net) -> None:
    """Hooks on it run once a microbatch, as in a whole backward."""
    found, calls = weights(), []
    for name, weight in found.items():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))  # type: ignore[misc]
    x = received(0)
    in_halves(net(x, found), x).weights()
    assert sorted(calls) == sorted(name for name, weight in found.items() if weight.grad is not None) != []


@pytest.mark.parametrize("layer_of", [torch.matmul, F.linear])
def test_gradients_are_not_all_there_beside_their_sums(layer_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Of eight layers that have a sum from a microbatch before; a linear one reads the transpose of its weight."""
    layers = [torch.randn(64, 64).requires_grad_() for _ in range(8)]
    for layer in layers:
        layer.grad = torch.zeros_like(layer)
    counter = LiveBytes()
    with counter:
        x = torch.randn(2, 64).requires_grad_()
        out = x
        for layer in layers:
            out = torch.tanh(layer_of(out, layer))
        halves = in_halves([out], x)
        del out
        before = counter.now
        counter.forget_peak()
        halves.weights()
    assert 0 < counter.peak - before < 3 * layers[0].nbytes
