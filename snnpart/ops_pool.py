"""`max_pool2d` that keeps for backward one byte a window: which of its places had the maximum.

torch keeps the input and eight bytes a window. Here the place is counted inside the window (row by row, the first is
0), so that a byte holds it. Results and gradients are torch's: of equal numbers the first one gets the gradient, of
several that are not a number the last. This is the reference for the CPU, and for checking the kernels of GPUs.

In half precision a place that several windows chose gets their sum in float32, rounded once: torch's on GPUs, and ours.
torch on a CPU rounds after each addition, so gradients differ there by such a rounding where windows overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.ops_norm import wide

LARGEST = 64
"""Places of a window, and of a stride by stride tile: a kernel has them all in its text."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Size, stride and padding of a pooling along (H, W), and whether windows may reach beyond the padding."""

    size: Pair
    stride: Pair
    padding: Pair
    ceil: bool

    def outputs(self, height: int, width: int) -> Pair:
        """How many windows there are along H and W, by torch's rule."""
        return self._along(0, height), self._along(1, width)

    def _along(self, dim: int, length: int) -> int:
        size, stride, padding = self.size[dim], self.stride[dim], self.padding[dim]
        beyond = stride - 1 if self.ceil else 0
        count = (length + 2 * padding - size + beyond) // stride + 1
        starts_outside = self.ceil and (count - 1) * stride >= length + padding
        return count - 1 if starts_outside else count

    def codes(self, places: Tensor, width: int) -> Tensor:
        """Places in images [..., OH, OW] of images `width` wide as bytes that count inside the window."""
        top, left = self._corners(places)
        found: Tensor = (places // width - top) * self.size[1] + places % width - left
        return found.to(torch.uint8)

    def places(self, codes: Tensor, width: int) -> Tensor:
        """`codes` back as places in images."""
        top, left = self._corners(codes)
        inside = codes.long()
        return (top + inside // self.size[1]) * width + left + inside % self.size[1]

    def _corners(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The first row [OH, 1] and column [OW] of each window."""
        count = (torch.arange(length, device=windows.device) for length in windows.shape[-2:])
        top, left = (n * s - p for n, s, p in zip(count, self.stride, self.padding, strict=True))
        return top.unsqueeze(1), left


def is_small(size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether windows of this size are pooled here: few places, side by side, and few from one window to the next."""
    return tuple(dilation) == (1, 1) and max(size[0] * size[1], stride[0] * stride[1]) <= LARGEST


def max_pool2d(
    x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair = (1, 1), ceil_mode: bool = False
) -> Tensor:
    """`torch.max_pool2d` of x [N, C, H, W] in floating point, with windows that `is_small` takes.

    Differentiable once.
    """
    if x.device.type != "cpu" or not x.numel():
        return torch.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    found: Tensor = _Apply.apply(x, Window(kernel_size, stride, padding, ceil_mode))
    return found


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        y, places = F.max_pool2d_with_indices(
            x, window.size, window.stride, window.padding, ceil_mode=window.ceil, return_indices=True
        )
        ctx.window, ctx.shape = window, x.shape
        ctx.save_for_backward(window.codes(places, x.shape[3]) if ctx.needs_input_grad[0] else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        places = ctx.window.places(codes, ctx.shape[3])
        dx = dy.new_zeros(*ctx.shape[:2], ctx.shape[2] * ctx.shape[3], dtype=wide(dy.dtype))
        dx.scatter_add_(2, places.flatten(2), dy.flatten(2).to(dx.dtype))
        return dx.view(ctx.shape).to(dy.dtype), None


POOL_OPS: tuple[Callable[..., Tensor], ...] = (max_pool2d,)
