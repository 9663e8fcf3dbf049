"""Norms over a dim that is dealt out: each rank's own mean and spread, gathered, give those of the whole.

With n_r numbers on rank r, of mean m_r and sum of squared distances q_r, the whole has

    n = sum n_r        mean = sum n_r m_r / n        q = sum q_r + sum n_r (m_r - mean)^2        variance = q / n

so that one small gather replaces that of the value, and nothing is lost to rounding as in a sum of squares. Numbers of
16 bits are summed in 32, as torch's own norms do. Forward and backward are those of plain torch operations; the
gradient of what was gathered is summed over the ranks, since each of them uses the whole for its own part.

- `moments`, `normalized`: layer_norm and rms_norm over the last dims.
- `channel_moments`, `group_normalized`: group_norm with groups that no rank holds whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snnpart.facts import Pieces
from snnpart.ops import select_pieces


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and statistics of a value are taken."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def moments(x: Tensor, dims: int, centred: bool) -> Tensor:
    """Mean and sum of squared distances from it over the last `dims` dims: [1, 2, ..., 1 for each of them].

    Not `centred` (rms_norm): a mean of 0 and the sum of squares.
    """
    x, over = x.to(wide(x.dtype)), tuple(range(x.dim() - dims, x.dim()))
    count = max(torch.Size(x.shape[-dims:]).numel(), 1)
    mean = x.sum(over, keepdim=True) / count if centred else x.new_zeros(()).expand(*x.shape[:-dims], *(1,) * dims)
    return torch.stack([mean, (x - mean).square().sum(over, keepdim=True)]).unsqueeze(0)


def normalized(
    x: Tensor,
    gathered: Tensor,
    counts: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centred: bool,
) -> Tensor:
    """layer_norm (rms_norm where not `centred`) of x, the rank's part of a value.

    Args:
        gathered: the ranks' `moments`, [ranks, 2, ...].
        counts: how many numbers each rank normalises together.
        weight, bias: the rank's parts of scale and shift.
        eps: added to the variance; None: the smallest step of the dtype.
    """
    means, squares, dtype, x = gathered[:, 0], gathered[:, 1], x.dtype, x.to(gathered.dtype)
    mean, spread = _merged(means, squares, torch.tensor(counts, dtype=x.dtype, device=x.device))
    variance = spread / sum(counts)
    eps = torch.finfo(dtype).eps if eps is None else eps
    out = (x - mean if centred else x) * torch.rsqrt(variance + eps)
    return _scaled(out, weight, bias).to(dtype)


def _merged(means: Tensor, squares: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and sum of squared distances from it, of parts along dim 0."""
    weights = counts.reshape(-1, *(1,) * (means.dim() - 1))
    mean = (means * weights).sum(0) / counts.sum()
    return mean, squares.sum(0) + (weights * (means - mean).square()).sum(0)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def channel_moments(x: Tensor) -> Tensor:
    """Mean and sum of squared distances from it of every sample and channel of [N, C, ...]: [2, N, C]."""
    x = x.to(wide(x.dtype))
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    mean = flat.mean(2)
    return torch.stack([mean, (flat - mean.unsqueeze(2)).square().sum(2)])


def group_normalized(
    x: Tensor,
    gathered: Tensor,
    own: Pieces,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """group_norm of x, the rank's channels `own` of a value of `gathered.shape[2]` channels in `groups` groups.

    Args:
        gathered: `channel_moments` of all channels.
        weight, bias: the rank's parts of scale and shift.
    """
    batch, channels, dtype, x = gathered.shape[1], gathered.shape[2], x.dtype, x.to(gathered.dtype)
    size, pixels = channels // groups, torch.Size(x.shape[2:]).numel()
    by_group = gathered.reshape(2, batch, groups, size)
    means, squares = by_group.movedim(3, 1)
    mean, spread = _merged(means, squares, x.new_full((size,), pixels))
    wanted = (select_pieces(stat.repeat_interleave(size, 1), 1, own) for stat in (mean, spread / (size * pixels)))
    tail = (1,) * (x.dim() - 2)
    mean, variance = (stat.reshape(*stat.shape, *tail) for stat in wanted)
    scale, shift = (None if p is None else p.reshape(-1, *tail) for p in (weight, bias))
    return _scaled((x - mean) * torch.rsqrt(variance + eps), scale, shift).to(dtype)


NORM_OPS: tuple[Callable[..., Tensor], ...] = (moments, normalized, channel_moments, group_normalized)
