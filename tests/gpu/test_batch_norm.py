"""The Triton kernels of BatchNorm against torch's on the same GPU."""

from __future__ import annotations

import pytest
import torch

from snnpart.runtime.kernels import batch_norm as kernels
from tests.runtime.kernels.norms import CASES, Case, errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Of a half-precision value one rounding, by which both may differ."""

LARGE = (Case((64, 24, 64, 64)), Case((64, 48, 96, 96)), Case((300_000, 20)))
OURS = [case for case in (*CASES, *LARGE) if not case.by_torch]


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("case", OURS, ids=str)
def test_kernels_give_what_torch_gives(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LEAST", 0)
    x = case.x(dtype, "cuda")
    assert kernels.takes(x, 0.1)
    assert {name: off for name, off in errors(case, x).items() if off > LIMITS[dtype]} == {}


def test_small_and_contiguous_values_are_left_to_torch() -> None:
    assert not kernels.takes(Case((4, 24, 8, 8)).x(torch.float32, "cuda"), 0.1)
    large = Case((64, 24, 64, 64)).x(torch.float32, "cuda")
    assert kernels.takes(large, 0.1) and not kernels.takes(large, None)
    assert not kernels.takes(large.contiguous(), 0.1)


def test_a_captured_norm_is_one_that_runs() -> None:
    """Replayed on another batch: result, gradient and running statistics are those of an eager step."""
    case = Case((64, 24, 64, 64))
    x = case.x(torch.bfloat16, "cuda").requires_grad_()
    weight, bias = (torch.full((24,), value, device="cuda", requires_grad=True) for value in (1.5, 0.5))
    running = torch.zeros(24, device="cuda"), torch.ones(24, device="cuda"), torch.zeros((), device="cuda")
    dy = torch.rand_like(x)

    def step(seen: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        y = kernels.batch_norm(x, weight, bias, *seen, True, 0.1, 1e-5)
        return (y, *torch.autograd.grad(y, (x, weight, bias), dy), *seen)

    eager = tuple(value.clone() for value in running)
    step(running)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = step(running)
    with torch.no_grad():
        x.mul_(2).add_(1)
    for own, before in zip(running, eager, strict=True):
        own.copy_(before)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, step(eager), strict=True))
