"""What the ranks do in the distributed tests: functions that `Pool.run` calls by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.runtime.launch import launch
from tests.distributed.handmade import compile_by_hand, make_net


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64) * 2
    return x, torch.randint(0, 3, (size,), generator=generator)


def train_handmade(
    sizes: list[list[int]], *, lr: float = 0.1, clip: float | None = None, **lowering: Any
) -> dict[str, Any]:
    """Train steps with SGD and momentum; `sizes[step][dp rank]` samples each."""
    program = compile_by_hand(make_net(), **lowering)
    factory = lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9)
    running = launch(program, optimizer=factory, clip_grad_norm=clip)
    losses, grads = [], {}
    for step, per_rank in enumerate(sizes):
        x, y = batch(step, sum(per_rank))
        start = sum(per_rank[: running.ranks.at.dp])
        mine = slice(start, start + per_rank[running.ranks.at.dp])
        losses.append(running.train_step(x[mine], y[mine], F.cross_entropy).item())
        grads = grads or running.gradients()
    x, y = batch(99, 5)
    outputs, loss = running.eval_step(x, y, F.cross_entropy)
    result = {
        "losses": losses,
        "gradients": grads,
        "state": running.state_dict(),
        "outputs": outputs,
        "eval": loss.item(),
    }
    running.close()
    return result
