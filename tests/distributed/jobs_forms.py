"""A network whose stages exchange values of every kind, and what the ranks do with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from tests.distributed.case import fill, reset
from tests.distributed.jobs import dp_share
from tests.neurons import LIF
from tests.neurons import data as det


class Seen(NamedTuple):
    """What the network noticed on its way."""

    winner: Tensor
    counts: list[Tensor]


class Forms(nn.Module):
    """Numbers [N, 5], a bool mask [N, 6] and classes [N] by keyword; a dict with a NamedTuple and a list in it.

    Made in the first layers and used or returned last: the winning unit (int64), which units are above 0 (bool), a
    value without a gradient, and one that only passes through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.fire_a = nn.Linear(5, 6), LIF(vth=0.2)
        self.b, self.fire_b = nn.Linear(6, 6), LIF(vth=0.2)
        self.c, self.fire_c = nn.Linear(6, 6), LIF(vth=0.2)
        self.by_winner, self.by_class = nn.Embedding(6, 6), nn.Embedding(3, 6)
        self.d = nn.Linear(6, 4)

    def forward(self, *, numbers: Tensor, mask: Tensor, classes: Tensor) -> dict[str, Any]:
        reset(self)
        current = self.a(numbers)
        winner, above, still = current.argmax(1), current > 0, current.detach().abs()
        first = self.fire_a(current)
        second = self.fire_b(self.b(first * mask))
        third = self.fire_c(self.c(second) + self.by_winner(winner) * still)
        late = torch.where(above, third, second) + self.by_class(classes)
        counts = [first.sum(1), (third > 0).sum(1)]
        return {"out": self.d(late), "seen": Seen(winner, counts), "above": (above, None)}


def made() -> nn.Module:
    return fill(Forms(), scale=0.9)


def batch(step: int, size: int = 7) -> tuple[dict[str, Tensor], Tensor]:
    """Keyword inputs and targets."""
    given = {
        "numbers": det(size, 5, k=0.6 + 0.2 * step) * 2,
        "mask": det(size, 6, k=0.9 + 0.1 * step) > -0.5,
        "classes": (torch.arange(size) + step) % 3,
    }
    return given, (torch.arange(size) * 2 + step) % 4


def loss_fn(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(out["out"], target) + 0.1 * out["seen"].counts[0].mean()


def train(**topology: Any) -> dict[str, Any]:
    """Two steps and an evaluation of seven samples over all dp ranks."""
    mine = lambda x, ranks: {k: dp_share(v, 0, ranks) for k, v in x.items()}  # noqa: E731
    program = parallelize(made(), example_inputs=batch(0)[0], verify="off", **topology)
    running: Any = program.launch(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    losses = []
    for step in range(2):
        x, y = batch(step)
        losses.append(running.train_step(mine(x, running.ranks), dp_share(y, 0, running.ranks), loss_fn).item())
    outputs = running.eval_step(mine(batch(2)[0], running.ranks))
    result = {"losses": losses, "gradients": running.gradients(), "state": running.state_dict()}
    result |= {"outputs": outputs, "dp": running.ranks.at.dp}
    kinds = {port.value.dtype for part in program.compiled.stages.values() for port in part.sends}
    result |= {"dtypes": sorted(map(str, kinds))}
    running.close()
    return result
