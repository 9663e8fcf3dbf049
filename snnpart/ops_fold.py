"""Tensors of a convolution or linear layer that has taken a BatchNorm in (`numerics="fold"`).

In eval BatchNorm is one factor and one summand a channel, which the layer before it can bring itself:

    scale = gamma / sqrt(var + eps)        weight' = weight * scale        bias' = (bias - mean) * scale + beta

computed of the live tensors at each call, in float32 where they are half: what it costs is a pass over the weights, not
over images. It is algebra, not the same order of rounding: results differ from the two layers' by the last digits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snnpart.ops_norm import wide


def scaled_weight(weight: Tensor, gamma: Tensor | None, var: Tensor, eps: float, dim: int, groups: int) -> Tensor:
    """The weight whose output channels are multiplied by a norm's scale [C].

    Args:
        dim: where the output channels are: 0, or 1 of a transposed convolution's weight [C_in, C / groups, ...].
        groups: of a transposed convolution, else 1.
    """
    scale = _scale(gamma, var, eps)
    if dim == 0:
        return (weight * scale.reshape(-1, *(1,) * (weight.dim() - 1))).to(weight.dtype)
    by_group = scale.reshape(groups, 1, -1, *(1,) * (weight.dim() - 2))
    return (weight.unflatten(0, (groups, -1)) * by_group).flatten(0, 1).to(weight.dtype)


def shifted_bias(
    bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """The bias [C] of the layer and the norm together."""
    away = -_wide(mean) if bias is None else bias - _wide(mean)
    shift = away * _scale(gamma, var, eps)
    made = shift if beta is None else shift + beta
    return made.to(mean.dtype if bias is None else bias.dtype)


def _scale(gamma: Tensor | None, var: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(_wide(var) + eps)
    return scale if gamma is None else scale * gamma


def _wide(value: Tensor) -> Tensor:
    return value.to(wide(value.dtype))


FOLD_OPS: tuple[Callable[..., Tensor], ...] = (scaled_weight, shifted_bias)
