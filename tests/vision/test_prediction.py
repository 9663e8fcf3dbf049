"""Prediction: an interrupted run goes on with what is missing; targets are not read unless asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from snnpart import vision
from snnpart.errors import ConfigError
from snnpart.vision.artifact import write
from snnpart.vision.data.sources import Split
from snnpart.vision.prediction import _Parts, _Writer
from tests.distributed.jobs_vision import waves
from tests.vision.nets import Plain


class Blind:
    """Samples whose targets must not be read."""

    def __len__(self) -> int:
        return 5

    def inputs_of(self, index: int) -> Tensor:
        return torch.full((1, 4, 4), index / 5, dtype=torch.float64)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the target was read")


def blind() -> Split:
    whole: Any = Blind()
    return Split(whole, Subset(whole, [4, 3, 2, 1, 0]))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    write(tmp_path / "artifact", Plain().state_dict(), {"model": "tests.vision.nets:Plain"})
    return {"artifact": tmp_path / "artifact", "dataset": waves, "batch_size": 2, "verify": "off"}


def test_an_interrupted_prediction_goes_on(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = vision.predict(
        vision.PredictionConfig(
            **{**options, "output": tmp_path / "whole.h5", "dataset": "tests.distributed.jobs_vision:waves"}
        )
    )
    real, rows = _Writer.append, list[Tensor]()

    def dies(self: _Writer, index: Tensor, logits: Tensor, targets: Tensor) -> None:
        if len(rows) == 2:
            raise KeyboardInterrupt
        rows.append(index)
        real(self, index, logits, targets)

    config = vision.PredictionConfig(
        **{**options, "output": tmp_path / "parts.h5", "dataset": "tests.distributed.jobs_vision:waves"}
    )
    monkeypatch.setattr(_Writer, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        vision.predict(config)
    assert not config.output.exists() and len(list(tmp_path.glob(".parts.h5.part-*"))) == 1
    answered: list[int] = []

    def notes(self: _Writer, index: Tensor, logits: Tensor, targets: Tensor) -> None:
        answered.extend(index.tolist())
        real(self, index, logits, targets)

    monkeypatch.setattr(_Writer, "append", notes)
    vision.predict(config)
    assert answered == list(range(4, 11)), "samples were answered twice"
    with h5py.File(whole) as one, h5py.File(config.output) as other:
        assert np.array_equal(one["index"], other["index"]) and np.array_equal(one["logits"], other["logits"])
    assert not list(tmp_path.glob(".parts.h5*"))


def test_parts_of_another_run_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    part = _Writer(tmp_path / ".out.h5.part-0000-0000-1.h5", "other", targets=False)
    part.append(torch.arange(2), torch.zeros(2, 3), torch.zeros(2))
    part.close()
    config = {**options, "output": tmp_path / "out.h5", "dataset": "tests.distributed.jobs_vision:waves"}
    with pytest.raises(ConfigError, match="belongs to another prediction"):
        vision.predict(vision.PredictionConfig(**config))
    vision.predict(vision.PredictionConfig(**config, resume=False))
    assert (tmp_path / "out.h5").exists()


def test_parts_of_other_weights_are_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact was exported again between two attempts: its name is the same, its answers are not."""
    config = vision.PredictionConfig(**{**options, "output": tmp_path / "out.h5"})
    with monkeypatch.context() as patch:
        patch.setattr(_Parts, "merge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vision.predict(config)
    torch.manual_seed(1)
    write(tmp_path / "artifact", Plain().state_dict(), {"model": "tests.vision.nets:Plain"})
    with pytest.raises(ConfigError, match="belongs to another prediction"):
        vision.predict(config)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_disk_that_cannot_take_the_answers(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 hands the error to `agree`, which raises it everywhere; what was answered stays for the next attempt."""
    config = vision.PredictionConfig(**{**options, "output": tmp_path / "out.h5"})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("snnpart.vision.prediction.os.replace", full)
        with pytest.raises(OSError, match="No space left"):
            vision.predict(config)
    assert not config.output.exists() and list(tmp_path.glob(".out.h5.part-*"))
    assert vision.predict(config).exists()


@pytest.mark.parametrize("split", ["validation", "all"])
def test_targets_are_not_read(split: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = {**options, "output": tmp_path / "out.h5", "dataset": "tests.vision.test_prediction:blind", "split": split}
    vision.predict(vision.PredictionConfig(**config))
    with h5py.File(tmp_path / "out.h5") as file:
        assert set(file) == {"index", "logits"} and len(file["index"]) == (10 if split == "all" else 5)


def test_the_folder_must_be_there(options: dict[str, Any], tmp_path: Path) -> None:
    config = {**options, "output": tmp_path / "no" / "out.h5", "dataset": "tests.vision.test_prediction:blind"}
    with pytest.raises(ConfigError, match="is not a folder"):
        vision.predict(vision.PredictionConfig(**config))
    with pytest.raises(ConfigError, match="is a folder"):
        vision.predict(vision.PredictionConfig(**{**config, "output": tmp_path}))
