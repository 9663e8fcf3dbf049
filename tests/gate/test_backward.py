"""Modules whose own backward fails: in eval mode they are compared without gradients, in training they are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snnpart import parallelize
from snnpart.errors import ConfigError, VerifyError


class Decoder(nn.Module):
    """What detectors do: a sigmoid whose result is written into, which autograd forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x).sigmoid()
        y[..., :2] = y[..., :2] * 2
        return y


def test_in_eval_mode_outputs_are_compared() -> None:
    program = parallelize(Decoder().double().eval(), example_inputs=torch.randn(4, 4).double(), tp=2)
    found = program._gate
    assert found is not None and found.traced.output == 0 and found.program is not None


def test_in_training_the_refusal_names_the_modules_own_backward() -> None:
    with pytest.raises(VerifyError, match="Decoder: backward of the module itself fails.*inplace"):
        parallelize(Decoder().double(), example_inputs=torch.randn(4, 4).double(), tp=2)


class ClosedOver(nn.Module):
    """The batch size of a module-wide variable."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).view(4, -1))
        return out


def test_microbatches_of_a_network_with_its_batch_size_written_in_are_refused() -> None:
    x = torch.randn(4, 1, 4, 4)
    assert parallelize(ClosedOver(), example_inputs=x, tp=2).plan.tp == 2
    with pytest.raises(ConfigError, match=r"2 microbatches: forward fails.*test_backward.py:\d+: .*view\(4, -1\)"):
        parallelize(ClosedOver(), example_inputs=x, pp=2)
