"""The loss that a step is given: what cannot be meant is refused before anything is changed."""

from __future__ import annotations

import pytest
import torch

from snnpart import parallelize
from snnpart.errors import ConfigError
from tests.zoo import ZOO


def test_a_loss_without_a_gradient_is_refused() -> None:
    model, inputs = ZOO["unet"].build()
    with parallelize(model, example_inputs=inputs, verify="off").launch() as running:
        with pytest.raises(ConfigError, match="the loss has no gradient, though the outputs have one"):
            running.train_step(inputs, torch.zeros(len(inputs[0])), lambda out, _: out.detach().mean())
