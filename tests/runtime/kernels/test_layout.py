"""Copies between layouts are torch's, bit for bit; products of stacks of matrices, and what lies with channels last."""

from __future__ import annotations

import pytest
import torch

from snnpart import ops_layout
from snnpart.runtime.kernels import layout
from tests.runtime.kernels.layouts import ORDERS, SIZES, copied
from tests.runtime.kernels.test_fused_neuron import lines_of
from tests.runtime.kernels.test_fused_neuron import pytestmark as in_the_interpreter


@in_the_interpreter
def test_tiles_are_turned_round() -> None:
    found = lines_of("", "layouts")
    assert len(found) == 2 * 8 * len(ORDERS)
    assert [line["case"] for line in found if not line["right"]] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_runs_are_copied_bit_by_bit_and_nothing_else_is_touched(dtype: torch.dtype, gap: int) -> None:
    """In numbers as wide as the places and the lengths of the runs allow."""
    for shape in SIZES:
        assert [name for name, right in copied(shape, dtype, "cpu", gap) if not right] == []


def test_nothing_is_copied_of_nothing() -> None:
    layout.copy_laid(torch.zeros(2, 0, 3), torch.zeros(3, 0, 2).permute(2, 1, 0))


def test_what_torch_broadcasts_is_broadcast() -> None:
    to = torch.zeros(2, 3, 8)
    layout.copy_laid(to, torch.arange(8.0).expand(2, 3, 8))
    layout.copy_laid(to[1], torch.arange(3.0).unsqueeze(1).expand(3, 8))
    assert torch.equal(to[0], torch.arange(8.0).expand(3, 8)) and torch.equal(to[1, :, 5], torch.arange(3.0))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 7), (2, 3), (2, 1, 4, 4), (2, 3, 2, 2, 2)])
def test_channels_go_behind_the_others(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = layout.channels_last(x)
    assert torch.equal(y, x) and ops_layout.lies_last(y)
    assert layout.channels_last(y) is y
    (gradient,) = torch.autograd.grad((y * 2).sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 2.0))


def test_a_product_of_stacks_is_torch_s() -> None:
    heads = torch.randn(2, 4, 6, 32, 24, dtype=torch.float64).movedim(3, 4).requires_grad_()
    a, b = heads[:, :, :3], heads[:, :, 3:].mT
    found, wanted = layout.matmul(a, b), torch.matmul(a, b)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), heads)[0] for y in (found, wanted)))
