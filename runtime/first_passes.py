"""Passes whose messages go through the host: the first ones of each kind on GPUs.

A message through NCCL is a kernel that waits on the GPU for the other rank. What a pass does for the first time may
wait for all kernels of the GPU: the driver loads a kernel when it is first launched ("loading kernels might require
context synchronization": CUDA Programming Guide, Lazy Loading), libraries try algorithms out and free the memory
afterwards. Two ranks of a pipeline that each wait so, with a message of the other under way, wait for ever. The first
passes of a kind therefore send over the CPU, where nothing waits on the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch

from snnpart.program import StageProgram

if TYPE_CHECKING:
    from snnpart.runtime.pipeline import Part

FIRST = 2
"""Passes of a kind that go through the host; the last warm-up before a capture must not, it starts communicators."""


class FirstPasses:
    """Counts the passes of each kind: network, mode, sizes of the microbatches."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, tuple[ReferenceType[StageProgram], int]] = {}

    def next_is_first(self, parts: Sequence[Part], training: bool) -> bool:
        """Whether the pass that begins now is one of the first of its kind. The same on all ranks of a pipeline, since
        they make the same passes."""
        program = next(iter(parts[0].bound.values())).program
        kind = id(program), training, torch.is_grad_enabled(), tuple(part.size for part in parts)
        _, before = self._runs.get(kind, (None, 0))
        if before < FIRST:
            self._runs[kind] = ref(program, lambda _: self._runs.pop(kind, None)), before + 1
        return before < FIRST
