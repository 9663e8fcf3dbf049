"""Mixup (Zhang et al., 2018): a batch is mixed with a permutation of itself, inputs and targets alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.errors import ConfigError
from snnpart.vision.data.loader import Batch


@dataclass(frozen=True)
class Mixup:
    """alpha of Beta(alpha, alpha); 0: batches stay as they are. The draw depends on seed, epoch and samples alone, so
    that the ranks of a pipeline and of a tp group, and a resumed run, draw the same."""

    alpha: float
    classes: int | None

    def __call__(self, batch: Batch, seed: tuple[int, int], rank: int, letters: str) -> tuple[Tensor, Any]:
        if not self.alpha:
            return batch.inputs, batch.targets
        if self.classes is None or batch.targets.is_floating_point() or batch.targets.dim() != 1:
            raise ConfigError("mixup needs targets that are class numbers", fix="set mixup_alpha = 0")
        rng = np.random.default_rng([abs(seed[0]), seed[1], rank, *batch.indices])
        share = float(rng.beta(self.alpha, self.alpha))
        order = torch.from_numpy(rng.permutation(len(batch.indices)))
        targets = F.one_hot(batch.targets, self.classes).to(batch.inputs.dtype)
        other = batch.inputs.index_select(letters.index("N"), order)
        return torch.lerp(other, batch.inputs, share), torch.lerp(targets[order], targets, share)
