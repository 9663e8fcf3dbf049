"""Tensors of a batch at addresses that stay: what a captured step reads.

A batch on the CPU is copied to the device on a stream of its own, into one of two buffers by turns, while the step
before computes; the captured step then reads a third one that is filled from it. Batches on the device are copied once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def kind_of(data: Any) -> Hashable:
    """Equal for batches that fit the same feed: structure, shapes, dtypes, and whatever is not a tensor."""
    leaves, spec = pytree.tree_flatten(data)
    return str(spec), tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _fixed(x) for x in leaves)


def _fixed(thing: Any) -> Hashable:
    return thing if isinstance(thing, (str, int, float, bool, type(None))) else id(thing)


class Feed:
    """A copy of a nested batch on the device; `data` has its structure."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves, self._spec = pytree.tree_flatten(batch)
        self._device = device
        self._places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self._held = [torch.empty_like(leaves[i], device=device, requires_grad=False) for i in self._places]
        self.data = self._like(leaves)
        self._lanes = [_Lane(self._held, device), _Lane(self._held, device)] if device.type == "cuda" else []
        self._turn = 0

    def _like(self, leaves: list[Any]) -> Any:
        held = dict(zip(self._places, self._held, strict=True))
        return pytree.tree_unflatten([held.get(i, x) for i, x in enumerate(leaves)], self._spec)

    def fill(self, batch: Any) -> None:
        """Copy another batch of the same kind; whoever reads `data` on the current stream afterwards sees it."""
        leaves = pytree.tree_leaves(batch)
        tensors = [leaves[i].detach() for i in self._places]
        if self._lanes and any(x.device.type == "cpu" for x in tensors):
            self._turn = 1 - self._turn
            tensors = self._lanes[self._turn].bring(tensors)
        for held, x in zip(self._held, tensors, strict=True):
            held.copy_(x)
        if self._lanes:
            self._lanes[self._turn].release()


class _Lane:
    """A buffer on the device that is filled on its own stream."""

    def __init__(self, like: list[Tensor], device: torch.device) -> None:
        self._like, self._buffers = like, list[Tensor]()
        self._stream = torch.cuda.Stream(device)
        self._ready, self._free = torch.cuda.Event(), torch.cuda.Event()

    def bring(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors on the device, from where the current stream may read them."""
        if not self._buffers:
            self._buffers = [torch.empty_like(x) for x in self._like]
            self._stream.wait_stream(torch.cuda.current_stream())
        self._stream.wait_event(self._free)
        with torch.cuda.stream(self._stream):
            for buffer, x in zip(self._buffers, tensors, strict=True):
                buffer.copy_(x, non_blocking=True)
            self._ready.record(self._stream)
        torch.cuda.current_stream().wait_event(self._ready)
        return self._buffers

    def release(self) -> None:
        """The current stream has read the buffer."""
        self._free.record(torch.cuda.current_stream())
