"""Weights' gradients that are computed later: the same numbers, beside whatever asks for them, and nothing is left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from snnpart import ops_later
from snnpart.ops_later import PRODUCTS, WeightLater, later

CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "linear": (F.linear, (2, 3, 5), (4, 5), ()),
    "conv1d": (torch.conv1d, (2, 4, 9), (6, 2, 3), (2, 1, 2, 2)),
    "conv2d": (torch.conv2d, (2, 4, 9, 8), (6, 4, 3, 2), ((1, 2), (1, 0))),
    "conv2d same": (torch.conv2d, (2, 4, 9, 8), (6, 4, 3, 3), (1, "same")),
    "one sample": (torch.conv2d, (4, 9, 8), (6, 4, 3, 3), ()),
    "conv3d": (torch.conv3d, (2, 2, 5, 4, 4), (3, 2, 3, 1, 3), ()),
    "conv_transpose1d": (torch.conv_transpose1d, (2, 4, 5), (4, 3, 3), (2, 1, 1)),
    "conv_transpose2d": (torch.conv_transpose2d, (2, 4, 5, 5), (4, 3, 3, 3), (2, 1, 1, 2, 1)),
    "conv_transpose3d": (torch.conv_transpose3d, (2, 2, 3, 3, 3), (2, 3, 2, 2, 2), ()),
}


def test_all_of_them_are_tried() -> None:
    assert {case[0] for case in CASES.values()} == set(PRODUCTS)


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[Callable[..., Tensor], list[Tensor], tuple[Any, ...]]:
    function, x, weight, rest = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator, dtype=dtype) for size in (x, weight)]
    transposed = function.__name__.startswith("conv_transpose")
    groups = rest[4 - 1] if transposed and len(rest) > 3 else 1
    channels = weight[1] * groups if transposed else weight[0]
    tensors.append(torch.randn(channels, generator=generator, dtype=dtype))
    return function, [item.requires_grad_() for item in tensors], rest


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, out.numel()).to(out).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), tensors))


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_operation(name: str) -> None:
    function, tensors, rest = made(name)
    want = function(*tensors, *rest)
    out = WeightLater(function)(tensors[0], later(tensors[1]), tensors[2], *rest)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for got, wanted in zip(gradients(out, tensors), gradients(want, tensors), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_autocast_rounds_as_it_does_for_the_operation(name: str) -> None:
    function, tensors, rest = made(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want = function(*tensors, *rest)
        out = WeightLater(function)(tensors[0], later(tensors[1]), tensors[2], *rest)
    assert out.dtype is torch.bfloat16 and torch.equal(out, want)
    for got, wanted in zip(gradients(out, tensors), gradients(want, tensors), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


LOG: list[str] = []


class Sum(Function):
    """Stands for a collective whose backward sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        LOG.append("begins")
        ops_later.compute_put_off()
        LOG.append("ends")
        return grads[0]


def test_the_gradient_is_computed_while_the_sum_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of two layers that read the same value; each reaches its weight right after."""
    compute = ops_later._Linear.of_weight

    def logged(*args: Any) -> Tensor:
        LOG.append("weight")
        return compute(*args)

    monkeypatch.setattr(ops_later._Linear, "of_weight", logged)
    LOG.clear()
    x, a, b = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for weight in (a, b):
        weight.register_hook(lambda grad: LOG.append("arrives"))  # type: ignore[arg-type]
    own = later(a), later(b)
    whole = Sum.apply(x.tanh())
    layer = WeightLater(F.linear)
    (layer(whole, own[0]) * layer(whole, own[1])).sum().backward()
    assert LOG == ["begins", "weight", "weight", "ends", "arrives", "arrives"]
    left = x.tanh()
    wanted = torch.autograd.grad((F.linear(left, a) * F.linear(left, b)).sum(), (x, a, b))
    for tensor, want in zip((x, a, b), wanted, strict=True):
        torch.testing.assert_close(tensor.grad, want)


def test_a_second_reader_takes_autograds_way() -> None:
    x, weight = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    own, layer = later(weight), WeightLater(F.linear)
    found = torch.autograd.grad((layer(x, own) * layer(x.tanh(), own)).sum(), (x, weight))
    wanted = torch.autograd.grad((F.linear(x, weight) * F.linear(x.tanh(), weight)).sum(), (x, weight))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_only_the_input_is_asked_for() -> None:
    function, tensors, rest = made("linear")
    out = WeightLater(function)(tensors[0], later(tensors[1]), tensors[2], *rest)
    (got,) = torch.autograd.grad(out.sum(), tensors[:1])
    torch.testing.assert_close(got, torch.autograd.grad(function(*tensors, *rest).sum(), tensors[:1])[0])


def test_a_weight_of_one_channel_keeps_its_strides() -> None:
    """torch's convolutions in float64 refuse others on the CPU."""
    weight = torch.randn(1, 3, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    own = later(weight.requires_grad_())
    assert own.stride() == weight.stride() == (27, 1, 9, 3)
    out = WeightLater(torch.conv2d)(x.requires_grad_(), own)
    torch.testing.assert_close(gradients(out, [weight]), gradients(torch.conv2d(x, weight), [weight]))


def test_what_does_not_learn_is_read_as_it_is() -> None:
    function, tensors, rest = made("conv2d")
    frozen = tensors[1].detach()
    assert later(frozen) is frozen
    out = WeightLater(function)(tensors[0], frozen, tensors[2], *rest)
    torch.testing.assert_close(out, function(tensors[0], frozen, tensors[2], *rest))
    with torch.no_grad():
        assert later(tensors[1]) is tensors[1]


def test_a_backward_that_breaks_off_leaves_nothing_waiting() -> None:
    class Breaks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("here")

    function, tensors, rest = made("conv2d")
    own = later(tensors[1])
    out = WeightLater(function)(Breaks.apply(tensors[0] * 2), own, tensors[2], *rest)
    with pytest.raises(ValueError, match="here"):
        out.sum().backward()
    del out, own
    torch.ones(2, requires_grad=True).sum().backward()  # torch keeps what has failed until then
    gc.collect()
    assert not list(ops_later._waiting)
