"""The gate compares the module in the mode that was traced; what the user froze in another mode stays so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from snnpart import gate
from snnpart.trace import trace


@pytest.mark.parametrize("training", [True, False])
def test_a_frozen_norm(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    model[1].eval()
    x = torch.randn(7, 4, dtype=torch.float64)
    gate.check_trace(model, trace(model, x, training=training), x)
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
