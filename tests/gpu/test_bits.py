"""The Triton kernels of `runtime.kernels.bits` against the torch reference, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snnpart import bits
from snnpart.ops_packed import PackedInput
from snnpart.runtime.kernels import bits as kernels
from tests.runtime.kernels.planes import CASES, Gathered

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


@pytest.mark.parametrize("shape", [(1, 2049, 1), (37, 5, 3), (4099, 1, 1), (3, 64, 49), (2048, 24, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_runs_go_to_their_places_in_a_larger_value(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """The kernel puts one rank's channels between those of others and touches nothing else."""
    x = torch.randint(0, 2, shape).to(dtype)
    whole = torch.zeros(shape[0], shape[1] + 7, shape[2], dtype=dtype, device="cuda")
    planes = kernels.pack(x.cuda(), (0, 2))
    kernels.unpack_into(planes, whole[:, 3 : 3 + shape[1]], (0, 2))
    assert torch.equal(whole[:, 3 : 3 + shape[1]].cpu(), x)
    assert not whole[:, :3].any() and not whole[:, 3 + shape[1] :].any()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_uneven_size_are_put_side_by_side(dtype: torch.dtype, case: Gathered) -> None:
    assert case.wrong(dtype, "cuda") == []


@pytest.mark.parametrize("captured", [False, True])
def test_a_convolution_that_keeps_bits_has_the_gradients_of_one_that_keeps_numbers(captured: bool) -> None:
    """Channels last, under bf16 autocast, also replayed from a CUDA graph; the forward leaves no image behind."""
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    x = torch.randint(0, 3, (8, 16, 32, 32), device="cuda").float().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(16, 16, 3, 3, device="cuda", requires_grad=True)
    rest = (None, (1, 1), (1, 1), (1, 1), 1)
    grads = []
    for run in (torch.conv2d, PackedInput(torch.conv2d, (0, 3), kernels.pack, kernels.unpack)):

        def step(run: Any = run) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                y = run(x, weight, *rest)
            return torch.autograd.grad((y.float() ** 2).sum(), weight)[0]

        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                grad = step()
            graph.replay()
        else:
            grad = step()
        grads.append(grad.clone())
    assert torch.equal(*grads) and float(grads[0].abs().max()) > 0
