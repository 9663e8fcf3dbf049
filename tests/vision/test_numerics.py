"""numerics="fold" and saved="packed" from the vision entry points: the answers and the training they leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from snnpart import vision
from snnpart.vision.session import compile_options
from tests.vision.nets import Digits
from tests.vision.test_training import trained


class Folding(nn.Module):
    """`Digits`, which has two norms, in float64 for images [N, 1, 4, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Digits(width=4)
        self.inner.head = nn.Linear(16, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_evaluation_and_prediction_answer_alike_with_folded_norms(tmp_path: Path) -> None:
    trained(model="tests.vision.test_numerics:Folding", epochs=2, export=tmp_path / "artifact")
    found: dict[str, Any] = {}
    for numerics in ("exact", "fold"):
        given: dict[str, Any] = {"artifact": tmp_path / "artifact", "numerics": numerics, "verify": "off"}
        loss = vision.evaluate(vision.EvaluationConfig(**given))["loss"]
        output = vision.predict(vision.PredictionConfig(output=tmp_path / f"{numerics}.h5", **given))
        with h5py.File(output) as file:
            found[numerics] = (loss, file["logits"][:])
    assert found["fold"][0] == pytest.approx(found["exact"][0], rel=1e-9)
    np.testing.assert_allclose(found["fold"][1], found["exact"][1], rtol=1e-9, atol=1e-9)
    assert len(np.unique(found["exact"][1], axis=0)) > 1


def test_training_keeps_bits_where_asked_and_learns_the_same(tmp_path: Path) -> None:
    losses = {}
    for saved in ("plain", "packed"):
        losses[saved] = trained(model="tests.vision.test_numerics:Folding", epochs=2, saved=saved)["train_loss"]
    assert losses["plain"] == losses["packed"]


def test_the_program_is_told_both() -> None:
    config = vision.TrainingConfig(model="tests.nets:Net", numerics="fold", saved="packed")
    options = compile_options(config, torch.zeros(3, 8, 8))
    assert (options["numerics"], options["saved"]) == ("fold", "packed")
