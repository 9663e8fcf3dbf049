"""Max pooling by codes is torch's, bit for bit: the reference on the CPU, and the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from snnpart import ops_pool
from snnpart.runtime.kernels.max_pool import max_pool2d
from tests.runtime.kernels.pools import POOLINGS, SHAPES, Pooling, differs, images, ran


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_the_reference_gives_what_torch_gives(pooling: Pooling, dtype: torch.dtype, channels_last: bool) -> None:
    for shape in SHAPES:
        x = images(shape, dtype, channels_last)
        assert set(differs(ops_pool.max_pool2d, pooling, x)) <= {"layout"}, shape
        _, gradient = ran(ops_pool.max_pool2d, pooling, x)
        assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_in_half_precision_sums_are_rounded_once(pooling: Pooling, dtype: torch.dtype) -> None:
    """Values are torch's; a gradient is the rounded one of float32."""
    for shape in SHAPES:
        x = images(shape, dtype, True)
        assert "values" not in differs(ops_pool.max_pool2d, pooling, x)
        _, gradient = ran(ops_pool.max_pool2d, pooling, x)
        wide = x.float().requires_grad_()
        y = pooling.of(torch.max_pool2d, wide)
        dy = torch.rand(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        y.backward(dy.float())
        assert wide.grad is not None and torch.equal(gradient, wide.grad.to(dtype))


@pytest.mark.all
def test_kernels_give_what_torch_gives() -> None:
    """Triton is told to interpret before it is imported: in a process of its own."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.kernels.pools"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{2 * len(POOLINGS) * len(SHAPES)} compared"]


def test_a_byte_a_window_is_kept() -> None:
    kept: list[tuple[torch.dtype, int]] = []
    x = torch.rand(2, 3, 8, 8, requires_grad=True)

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append((saved.dtype, saved.numel()))
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        y = max_pool2d(x, (3, 3), (2, 2), (1, 1))
        max_pool2d(x.detach(), (3, 3), (2, 2), (1, 1))
    assert kept == [(torch.uint8, y.numel())]


def test_images_without_samples_are_pooled() -> None:
    x = torch.rand(0, 3, 8, 8, requires_grad=True)
    y = max_pool2d(x, (2, 2), (2, 2), (0, 0))
    y.sum().backward()
    assert y.shape == (0, 3, 4, 4) and x.grad is not None and x.grad.shape == x.shape


def test_it_is_differentiable_once() -> None:
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(max_pool2d(x, (2, 2), (2, 2), (0, 0)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        torch.autograd.grad((gradient * x).sum(), x, create_graph=True)[0].sum().backward()
