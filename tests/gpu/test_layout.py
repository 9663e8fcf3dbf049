"""Copies between layouts and products of stacks of matrices on a GPU."""

from __future__ import annotations

import pytest
import torch

from snnpart import ops_layout
from snnpart.runtime.kernels import layout
from tests.runtime.kernels.layouts import SIZES, copied

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [*SIZES, (3, 200, 130, 2)], ids=str)
def test_every_bit_arrives_and_nothing_else_is_touched(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for gap in (0, 3, 16):
        assert [name for name, right in copied(shape, dtype, "cuda", gap) if not right] == []


def test_channels_go_behind_the_others() -> None:
    x = torch.randn(64, 96, 17, 33, device="cuda", requires_grad=True)
    y = layout.channels_last(x)
    assert torch.equal(y, x) and ops_layout.lies_last(y) and y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.autograd.grad((y * x.detach()).sum(), x)[0], x.detach())


def test_more_tiles_than_a_grid_has_along_its_second_dim() -> None:
    x = torch.rand(1, 3, 64 * 66_000, device="cuda")
    assert torch.equal(layout.channels_last(x), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_with_their_channels_last_are_multiplied_without_being_turned(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are parts [T, N, heads, D, L] of a value with its channels last."""
    torch.manual_seed(0)
    merged = torch.randn(4, 8, 64, 3 * 6 * 32, device="cuda", dtype=dtype).movedim(-1, 2).unflatten(2, (18, 32))
    merged.requires_grad_()
    q, k, v = merged.chunk(3, 2)

    def attention(product: object) -> torch.Tensor:
        return product(product(v, k.mT), q)  # type: ignore[operator, no-any-return]

    turned: list[torch.Size] = []
    monkeypatch.setattr(layout, "_turn", lambda to, *_: turned.append(to.shape))
    found = attention(layout.matmul)
    assert turned == []
    wanted = attention(torch.matmul)
    limit = 1e-10 if dtype is torch.float64 else 2**-6
    grads = [torch.autograd.grad(y.square().sum(), merged)[0] for y in (found, wanted)]
    for one, other in ((found, wanted), grads):
        assert float((one - other).abs().max() / other.abs().max()) < limit
