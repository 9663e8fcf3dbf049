"""The Triton kernels of `runtime.kernels.bits` against the torch reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from snnpart import bits
from snnpart.runtime.kernels import bits as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("low, states", [(0, 2), (-1, 3), (0, 6), (0, 200)])
@pytest.mark.parametrize("elements", [0, 1, 7, 8, 2049, 100_003])
def test_kernels_are_bit_equal_to_the_reference(dtype: torch.dtype, low: int, states: int, elements: int) -> None:
    if dtype is torch.bool:
        low, states = 0, 2
    x = torch.randint(low, low + states, (elements,)).to(dtype)
    planes = kernels.pack(x.cuda(), (low, states))
    assert torch.equal(planes.cpu(), bits.pack(x, (low, states)))
    back = kernels.unpack(planes, elements, (low, states), dtype)
    assert back.dtype is dtype and torch.equal(back.cpu(), x)
