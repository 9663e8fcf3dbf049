"""Inputs of other steps, and values of the loop from more than one step ago."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.passes.rewrite.fold_time.parity import active, check, images
from tests.passes.rewrite.fold_time.test_cases import _repeats, lif, loops

Take = Callable[[Tensor, int], Tensor]


class Inputs(nn.Module):
    """Two layers: one reads the step's input, one what `take` finds in the sequence."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take, self.now, self.other, self.out = take, nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        v, record = None, []
        for t in range(x.shape[0]):
            s, v = lif(self.now(x[t]) + self.other(self.take(x, t)), v)
            record.append(self.out(s))
        return torch.stack(record)


def folded(module: nn.Module, steps: int) -> Any:
    torch.manual_seed(0)
    return check(active(module), images(steps, 3, 6), fires=False, in_dims=1, time_dims=0)


FOLDED: dict[str, Take] = {
    "the two steps before the first are the last ones": lambda x, t: x[t - 2],
    "the one step before the first is the last one": lambda x, t: x[t - 1],
    "before the third the first": lambda x, t: x[max(t - 2, 0)],
    "after the last but one the last": lambda x, t: x[min(t + 1, len(x) - 1)],
    "backwards": lambda x, t: x[-1 - t],
    "every second, twice": lambda x, t: x[2 * t % len(x)],
}
STAYS: dict[str, tuple[Take, str]] = {
    "each twice": (lambda x, t: x[t // 2], "its index takes the values [0, 0, 1, 1, 2, 2]"),
    "two indices": (lambda x, t: x[t] + x[t, :, t].unsqueeze(-1), "its steps are no view of one tensor"),
    "a growing window": (lambda x, t: x[: t + 1].mean(0), "test_delays.py"),
    "nothing at first": (lambda x, t: x[t - 2] if t > 1 else torch.zeros_like(x[0]), "does not run alike at step 2"),
}


@pytest.mark.parametrize("steps", [2, 3, 6, 8])
@pytest.mark.parametrize("name", FOLDED)
def test_inputs_of_other_steps_are_views(name: str, steps: int) -> None:
    graph = folded(Inputs(FOLDED[name]), steps)
    assert _repeats(graph, "linear") == 3 and len(loops(graph)) == 1
    assert "stays as it is" not in graph.notes["fold-time"]


@pytest.mark.parametrize("name", STAYS)
def test_what_is_taken_in_another_way_stays(name: str) -> None:
    take, why = STAYS[name]
    graph = folded(Inputs(take), 6)
    note = graph.notes["fold-time"]
    assert why in note and "stays as it is" in note and len(loops(graph)) == 1


class Past(nn.Module):
    """Reads what the loop itself made two steps ago: the input's features, or the spikes."""

    def __init__(self, spikes: bool) -> None:
        super().__init__()
        self.spikes, self.fc, self.out = spikes, nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        v, record = None, []
        older = old = torch.zeros(x.shape[1], 5, dtype=x.dtype)
        for step in x:
            now = self.fc(step)
            s, v = lif(now + 0.5 * older, v)
            older, old = old, s if self.spikes else now
            record.append(self.out(s))
        return torch.stack(record)


@pytest.mark.parametrize("spikes", [False, True])
def test_values_of_two_steps_ago_stay_per_step_and_the_layers_around_them_fold(spikes: bool) -> None:
    graph = folded(Past(spikes), 6)
    assert "stays as it is" in graph.notes["fold-time"] and "test_delays.py" in graph.notes["fold-time"]
    assert _repeats(graph, "linear") == 2
