"""One GPU: max pooling by codes is torch's on the CPU bit for bit, in every dtype and layout, and can be captured."""

from __future__ import annotations

import pytest
import torch

from snnpart.runtime.kernels.max_pool import max_pool2d
from tests.runtime.kernels.pools import POOLINGS, SHAPES, Pooling, differs, images, ran

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STEM = Pooling((3, 3), (2, 2), (1, 1))


def on_gpu(x: torch.Tensor, *given: object) -> torch.Tensor:
    """The kernels' result and gradient, back on the CPU."""
    found = max_pool2d(x.cuda(), *given)  # type: ignore[arg-type]
    return found.cpu()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_kernels_give_what_torch_gives(pooling: Pooling, dtype: torch.dtype, channels_last: bool) -> None:
    for shape in SHAPES:
        assert differs(on_gpu, pooling, images(shape, dtype, channels_last)) == [], shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_large_images_have_torch_s_values_and_gradients(pooling: Pooling, dtype: torch.dtype) -> None:
    """Against torch's own kernels in float64; of half precision only a gradient's last digit is rounded."""
    x = torch.randn(16, 96, 37, 41, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    value, gradient = ran(max_pool2d, pooling, x)
    assert value.dtype is dtype and gradient.dtype is dtype
    wanted, exact = ran(torch.max_pool2d, pooling, x.double())
    assert torch.equal(value.double(), wanted)
    limit = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-22, torch.float64: 0.0}[dtype]
    torch.testing.assert_close(gradient.double(), exact, rtol=2 * limit, atol=2 * limit)
    assert float(exact.abs().max()) > 0.5


def test_a_captured_pooling_is_replayed_on_other_images() -> None:
    x = torch.zeros(4, 8, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    weights = torch.rand(4, 8, 8, 8, device="cuda")

    def step() -> torch.Tensor:
        return torch.autograd.grad((STEM.of(max_pool2d, x) * weights).sum(), x)[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient = step()
    with torch.no_grad():
        x.copy_(torch.rand_like(x))
    graph.replay()
    (wanted,) = torch.autograd.grad((STEM.of(torch.max_pool2d, x) * weights).sum(), x)
    assert torch.equal(gradient, wanted) and float(wanted.abs().max()) > 0
