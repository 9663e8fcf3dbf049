"""Counts the bytes of the tensors that live: what an operation keeps and needs is found out by running it.

Every tensor that an operation makes inside the block counts from then until its memory is given back, backward
included; what a kernel takes for itself is not seen. Memory that a file is mapped to does not count.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from snnpart.compat import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`now`: bytes of all living tensors that were made inside the block; `peak`: the most since `forget_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def forget_peak(self) -> None:
        """Count the peak from here on."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            counts = isinstance(x, Tensor) and not x.is_meta and not _is_mapped(func)
            if counts and x.untyped_storage()._cdata not in given:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes()
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _is_mapped(func: Any) -> bool:
    return bool(func is torch.ops.aten.set_.source_Storage_storage_offset)
