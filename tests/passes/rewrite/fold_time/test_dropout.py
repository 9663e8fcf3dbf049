"""Masks of dropout (A15): one a step, one a window, one made at the first step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graphs import calls
from tests.passes.rewrite.fold_time.parity import active, check, fold, images, run, traced
from tests.passes.rewrite.fold_time.test_cases import lif


class Dropped(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.dropout(x, 0.5, self.training) for _ in range(self.steps)])


class DroppedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 64), nn.Linear(64, 64, bias=False)
        nn.init.eye_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.b(F.dropout(self.a(x) * 0 + 1, 0.5, self.training)) for _ in range(6)])


def test_every_step_has_a_dropout_mask_of_its_own() -> None:
    graph = fold(traced(DroppedNet(), images(50, 6, dtype=torch.float32)))
    (y,) = run(graph, images(50, 6, dtype=torch.float32)).outputs
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert abs(float(y.mean()) - 1) < 0.05
    assert not any(torch.equal(y[0], y[t]) for t in range(1, 6))
    assert len(calls(graph, torch.dropout)) == 1


def test_a_mask_for_the_whole_window_stays_one_mask() -> None:
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    net = active(nn.Sequential(nn.Linear(6, 40), layer.Dropout(0.5), nn.Linear(40, 3)), scale=1.0)
    graph = check(net, images(3, 6), fires=False, time_steps=4)
    assert len(calls(graph, torch.dropout)) == 1 and not graph.leaves


class SequenceDropout(nn.Module):
    """Makes its mask at the first step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask, v, out = None, None, []
        for t in range(x.shape[1]):
            s, v = lif(self.a(x[:, t]), v)
            if mask is None:
                mask = F.dropout(torch.ones_like(s), 0.5)
            out.append(self.b(s * mask))
        return torch.stack(out)


@pytest.mark.parametrize("steps", [2, 5])
def test_a_mask_made_at_the_first_step_is_used_at_all(steps: int) -> None:
    torch.manual_seed(0)
    graph = check(active(SequenceDropout()), images(3, steps, 4), time_dims=1, fires=steps > 2)
    assert len(calls(graph, torch.dropout)) == 1
