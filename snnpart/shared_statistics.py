"""BatchNorm whose statistics are those of all data-parallel ranks together (`batchnorm="sync"`).

    mean = sum over ranks of sum(x) / n,    var = sum over ranks of sum((x - mean)^2) / n,    n counted over the ranks

Both sums are differentiable: a rank's x moves every rank's result, and its gradient sums what comes back. Ranks may
hold different numbers of samples. The running averages and the counter move once, by the same numbers on every rank.
Only the data-parallel axis is meant, never tp, whose ranks hold other channels. Which dim holds them is what the traced
graph says, not what a shape looks like: torch's SyncBatchNorm takes the batch for channels in [T, N, C, H, W].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_total: Callable[[Tensor], Tensor] | None = None


@contextmanager
def sharing(total: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Batch statistics inside the block are shared. `total` is the differentiable sum over the ranks; None: not."""
    global _total
    before, _total = _total, total
    try:
        yield
    finally:
        _total = before


def shared() -> bool:
    """Whether batch statistics are those of several ranks here."""
    return _total is not None


def total(x: Tensor) -> Tensor:
    """The sum of x over the ranks that share statistics."""
    return x if _total is None else _total(x)


def current() -> Callable[[Tensor], Tensor] | None:
    """The sum over the ranks that share statistics here, to be kept for a backward; None where they are not shared."""
    return _total


def merged(
    mean: Tensor, var: Tensor, count: int, over_ranks: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of all ranks' numbers from each rank's own, and how many numbers [] that are.

    One message: sums of x and of its squares. They are float64, so that nothing is lost between them.

    Args:
        mean, var: [..., C] of this rank's `count` numbers a channel.
    """
    m, v = mean.double(), var.double()
    own = torch.cat([(m * count).flatten(), ((v + m.square()) * count).flatten(), m.new_full((1,), count)])
    sums = over_ranks(own)
    middle, squares = (sums[:-1] / sums[-1]).reshape(2, *mean.shape)
    return middle.to(mean.dtype), (squares - middle.square()).clamp_min(0).to(var.dtype), sums[-1]


@torch.no_grad()
def track(average: Tensor | None, values: Tensor, factor: float) -> None:
    """Move a running average [C] by the values [steps, C], one after the other."""
    if average is None:
        return
    steps = len(values)
    left = (1.0 - factor) ** torch.arange(steps - 1, -1, -1, device=values.device, dtype=values.dtype)
    moved = (left.unsqueeze(1) * values).sum(0).to(average.dtype)
    average.mul_((1.0 - factor) ** steps).add_(moved, alpha=factor)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: float,
    eps: float,
) -> Tensor:
    """`F.batch_norm` of x [N, C, ...] in training, over all ranks; `factor` is how far the averages move."""
    wide = x.float() if x.dtype in _HALVES else x
    dims, form = [0, *range(2, x.dim())], (1, -1, *(1,) * (x.dim() - 2))
    count = wide.new_full((1,), x.numel() // x.shape[1])
    *_, numbers = sums = total(torch.cat([wide.sum(dims), count]))
    mean = sums[:-1] / numbers
    centred = wide - mean.reshape(form)
    var = total(centred.square().sum(dims)) / numbers
    y = centred * torch.rsqrt(var + eps).reshape(form)
    if weight is not None:
        y = y * weight.reshape(form)
    if bias is not None:
        y = y + bias.reshape(form)
    _move(running_mean, mean, factor)
    _move(running_var, var * numbers / (numbers - 1).clamp(min=1), factor)
    return y.to(x.dtype)


@torch.no_grad()
def _move(average: Tensor | None, value: Tensor, factor: float) -> None:
    if average is not None:
        average.lerp_(value.detach().to(average.dtype), factor)
