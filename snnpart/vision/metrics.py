"""Sums over all samples of a pass, exact on any topology: numbers and counts are summed, never means."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snnpart.runtime.ranks import Ranks


@dataclass
class Sums:
    """Loss, top-1 and top-5 hits and samples, on the device until they are read."""

    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    top1: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    top5: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    samples: int = 0

    def add(self, logits: Tensor, targets: Any, losses: Tensor) -> None:
        """Rows that count: logits [n, K], targets [n] (class numbers; others give no hits), the sum of losses."""
        self.loss = self.loss.to(losses.device) + losses.detach().double()
        self.samples += len(logits)
        numbers = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
        if not numbers or logits.dim() != 2:
            return
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets.unsqueeze(1)
        self.top1 = self.top1.to(logits.device) + best[:, 0].sum()
        self.top5 = self.top5.to(logits.device) + best.any(1).sum()

    def over_ranks(self, ranks: Ranks, counts: bool) -> dict[str, float]:
        """Mean loss and shares of hits over all samples of all ranks that count."""
        mine = [float(self.loss), float(self.top1), float(self.top5), float(self.samples)]
        loss, top1, top5, samples = ranks.sum(mine if counts else [0.0] * 4)
        return {"loss": loss / samples, "top1": top1 / samples, "top5": top5 / samples, "samples": samples}


def peak_bytes(ranks: Ranks) -> int:
    """The largest memory that a rank has used: of its GPU, or of its process."""
    if ranks.device.type == "cuda":
        mine = torch.cuda.max_memory_allocated(ranks.device)
    else:
        kilo = 1 if sys.platform == "darwin" else 1024
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo
    return int(max(ranks.gather(mine)))
