"""Whether kernels can run on a value."""

from __future__ import annotations

from torch import Tensor

try:
    import triton
except ImportError:  # CPU builds of torch come without it
    triton = None


def runs_kernels(x: Tensor) -> bool:
    """Whether x is on a GPU for which there is Triton, or Triton interprets kernels on the CPU, as tests have it."""
    return triton is not None and (x.is_cuda or bool(triton.knobs.runtime.interpret))
