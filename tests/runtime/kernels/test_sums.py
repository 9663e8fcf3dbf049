"""Kernels that sum over many programs, in Triton's interpreter."""

from __future__ import annotations

from tests.runtime.kernels.sums import SHAPES
from tests.runtime.kernels.test_fused_neuron import lines_of, pytestmark

__all__ = ["pytestmark"]


def test_statistics_and_sums_are_torch_s() -> None:
    """In float64, of numbers around 1000 whose spread is 3."""
    found = lines_of("", "sums")
    assert len(found) == 2 * len(SHAPES) + 1
    assert max(line["off"] for line in found) < 1e-11
    assert max(line["programs"] for line in found[:-1]) > 1 and max(line["tiles"] for line in found) > 1
