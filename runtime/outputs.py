"""Outputs of a forward pass: from the last stage to every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snnpart.runtime.ranks import Ranks

Kinds = list[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each flat output."""


def kinds_of(outputs: Sequence[Tensor], ranks: Ranks, last: int) -> Kinds:
    """What the last stage's outputs are, on every rank of the pipeline; `last` is its rank. Collective over pp."""
    found: Kinds = ranks.gather([(tuple(x.shape), x.dtype) for x in outputs], ranks.axes["pp"])[last]
    return found


def share(outputs: Sequence[Tensor], ranks: Ranks, last: int, kinds: Kinds) -> list[Tensor]:
    """The last stage's flat outputs on every rank of the pipeline. Collective over pp."""
    axis = ranks.axes["pp"]
    if axis.group is None:
        return list(outputs)
    if axis.index == last:
        shared = [x.detach().contiguous() for x in outputs]
    else:
        shared = [torch.empty(shape, dtype=dtype, device=ranks.device) for shape, dtype in kinds]
    for x in shared:
        ranks.broadcast(x.view(torch.uint8) if x.dtype is torch.bool else x, axis, last)
    return shared
