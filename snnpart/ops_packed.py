"""`PackedInput`: an operation whose first input is kept for backward as bits (`saved="packed"`).

What a convolution or a linear layer of a spiking network reads are spikes, or sums of a few: whole numbers that a byte
or less can tell apart, kept by autograd as floating-point numbers until the weight's gradient has been computed. Here
the bits are kept (`bits`), and the numbers are made of them again in backward, which is exact. The input's memory is
free as soon as nobody else needs it: 1/16 of it is left for bfloat16 spikes.

Under autocast the input is converted first, as the operation would do itself, because what it keeps must be what is
packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from snnpart import bits
from snnpart.bits import States
from snnpart.ops import name_target

Pack = Callable[[Tensor, States], Tensor]
Unpack = Callable[[Tensor, int, States, torch.dtype], Tensor]


@dataclass(frozen=True)
class _Kept:
    """A dense tensor as bits: its memory in order, and how it lay."""

    planes: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PackedInput:
    """Calls `function`, whose first argument holds whole numbers of `states` only.

    `pack` and `unpack` are `bits.pack` and `bits.unpack`, or what is as good on a GPU.
    """

    function: Callable[..., Tensor]
    states: States
    pack: Pack = bits.pack
    unpack: Unpack = bits.unpack

    def __post_init__(self) -> None:
        name_target(self, self.function.__name__, __name__)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled() or not x.numel():
            return self.function(x, *args, **kwargs)
        x = _dense(as_autocast_does(x))
        memory, numel = x.untyped_storage().data_ptr(), x.numel()  # the hook outlives the call: it must not hold x

        def keep(saved: Tensor) -> Any:
            same = saved.untyped_storage().data_ptr() == memory and saved.numel() == numel
            return self._packed(saved) if same else saved

        with saved_tensors_hooks(keep, self._unpacked):
            return self.function(x, *args, **kwargs)

    def _packed(self, x: Tensor) -> _Kept:
        flat = x.detach().as_strided((x.numel(),), (1,))
        return _Kept(self.pack(flat, self.states), x.shape, x.stride(), x.dtype)

    def _unpacked(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        flat = self.unpack(kept.planes, kept.shape.numel(), self.states, kept.dtype)
        return flat.as_strided(kept.shape, kept.stride)


def as_autocast_does(x: Tensor) -> Tensor:
    """x in the dtype that autocast gives what convolutions and linear layers read."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and _is_cast(x) else x


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64


def _dense(x: Tensor) -> Tensor:
    """x itself where its numbers lie side by side from the start of its memory, contiguous or with channels last."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if x.storage_offset() == 0 and (last or x.is_contiguous()) else x.contiguous()
