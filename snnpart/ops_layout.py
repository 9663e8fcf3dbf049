"""What the channels-last pass writes into graphs: how a value is to lie in memory, and products that take it as it
lies. In plain torch, for CPUs (`runtime.kernels.layout` on GPUs)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def channels_last(x: Tensor) -> Tensor:
    """x [N, C, ...] with its channels last in memory; x itself where it lies so."""
    return x if lies_last(x) else x.movedim(1, -1).contiguous().movedim(-1, 1)


def lies_last(x: Tensor) -> bool:
    """Whether x [N, C, ...] is dense with its channels last."""
    return x.movedim(1, -1).is_contiguous()


def empty_last(x: Tensor) -> Tensor:
    """An empty value like x [N, C, ...], with its channels last."""
    return x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).movedim(-1, 1)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of two stacks of as many matrices, [..., M, K] and [..., K, N], in whatever layout."""
    return torch.matmul(a, b)


LAYOUT_OPS: tuple[Callable[..., Tensor], ...] = (channels_last, matmul)
