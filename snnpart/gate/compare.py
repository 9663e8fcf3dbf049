"""Compare two observations of one network.

The tolerance is relative: 1e-9 in float64 and 1e-5 in float32 (1e-2 in half precision) of the tensor's largest value
plus the largest of its kind (outputs, gradients, buffers). The second term is there for values that are zero but for
rounding, such as the gradient of a bias in front of a BatchNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from snnpart.gate.observe import Observed

TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5}
HALF_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest differences of each kind, relative to the scale above, and how many spikes differ."""

    output: float
    gradient: float
    buffer: float
    flips: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that differs by more than its tolerance: kind, name, the relative difference and the tolerance."""

    kind: str
    name: str
    difference: float
    tolerance: float


def compare(want: Observed, got: Observed) -> tuple[Differences, list[Mismatch]]:
    """The differences of `got` from `want`, and what of it is beyond tolerance."""
    wrong: list[Mismatch] = []
    outputs = _compare_kind("output", dict(enumerate_names(want.outputs)), dict(enumerate_names(got.outputs)), wrong)
    gradients = _compare_kind("gradient", want.gradients, got.gradients, wrong) if want.differentiable else 0.0
    buffers = _compare_kind("buffer", want.buffers, got.buffers, wrong)
    return Differences(outputs, gradients, buffers, _flips(want, got)), wrong


def enumerate_names(tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Outputs have no names: they are numbered."""
    return [(str(position), tensor) for position, tensor in enumerate(tensors)]


def _compare_kind(
    kind: str, want: Mapping[str, Tensor | None], got: Mapping[str, Tensor | None], wrong: list[Mismatch]
) -> float:
    largest = max((_peak(value) for value in want.values() if value is not None), default=0.0)
    worst = 0.0
    for name in {**want, **got}:
        difference, tolerance = _difference(want.get(name), got.get(name), largest)
        worst = max(worst, difference)
        if not difference <= tolerance:
            wrong.append(Mismatch(kind, name, difference, tolerance))
    return worst


def _difference(want: Tensor | None, got: Tensor | None, largest: float) -> tuple[float, float]:
    """The relative difference of two tensors and what is allowed; a missing tensor counts as zeros."""
    present = want if want is not None else got
    if present is None:
        return 0.0, 0.0
    tolerance = TOLERANCES.get(present.dtype, HALF_TOLERANCE if present.is_floating_point() else 0.0)
    want = torch.zeros_like(present) if want is None else want
    got = torch.zeros_like(present) if got is None else got
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf"), tolerance
    if want.numel() == 0 or torch.equal(want, got):
        return 0.0, tolerance
    scale = _peak(want) + largest
    difference = float((_wide(want) - _wide(got)).abs().max())
    return (difference / scale if scale else float("inf")), tolerance


def _wide(value: Tensor) -> Tensor:
    return value if value.is_complex() else value.double()


def _peak(value: Tensor) -> float:
    return float(_wide(value).abs().max()) if value.numel() else 0.0


def _flips(want: Observed, got: Observed) -> int:
    """Outputs of neuron layers that are zero in one run and not in the other."""
    return sum(
        int((one != two).sum())
        for layer, masks in want.spikes.items()
        for one, two in zip(masks, got.spikes.get(layer, ()))
        if one.shape == two.shape
    )
