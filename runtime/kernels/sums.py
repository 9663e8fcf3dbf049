"""Gradients of what every sample shares, from the sums over channels that a fused neuron's backward leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from snnpart.runtime.kernels.neuron_code import Form


def affine_gradients(form: Form, sums: Mapping[str, Tensor], weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of BatchNorm's weight and bias [C], over all steps."""
    dw, db = ([sums[f"{name}{mark}"] for mark in form.marks] for name in ("sum_dyx", "sum_dy"))
    return _together(dw).to(weight.dtype), _together(db).to(bias.dtype)


def _together(steps: Sequence[Tensor]) -> Tensor:
    """The sum over steps; no kernels where the steps were summed together already."""
    return steps[0] if len(steps) == 1 else torch.stack(list(steps)).sum(0)


def parameter_gradient(sums: Tensor | None, value: Tensor) -> Tensor | None:
    """The gradient of a neuron's parameter: a number a channel, or one for all."""
    if sums is None:
        return None
    return (sums if value.numel() > 1 else sums.sum()).reshape(value.shape).to(value.dtype)
