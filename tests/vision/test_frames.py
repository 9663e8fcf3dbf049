"""Frames of several T: batched by T, with the answers that every sample has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from snnpart import vision
from snnpart.errors import ConfigError
from snnpart.vision.data.frames import FrameFolder, open_frames
from tests.vision.nets import Frames

LENGTHS = (3, 4, 3, 5, 4, 3, 3, 4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Frames [T, 2, 4, 4] of eight samples in two classes, of three T, as .npz, .npy and HDF5."""
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for number, steps in enumerate(LENGTHS):
            folder = tmp_path / "frames" / part / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            frames = rng.random((steps, 2, 4, 4), dtype=np.float32) * 3
            if number % 3 == 0:
                np.savez(folder / f"{number}.npz", frames=frames)
            elif number % 3 == 1:
                np.save(folder / f"{number}.npy", frames)
            else:
                with h5py.File(folder / f"{number}.h5", "w") as file:
                    file["frames"] = frames
    return tmp_path / "frames"


def settings(root: Path, **fields: Any) -> dict[str, Any]:
    given = {"model": Frames, "dataset": "dvs_frames", "dataset_kwargs": {"root": str(root)}, "input_layout": "NTCHW"}
    return {**given, "verify": "off", **fields}


def test_lengths_are_read_from_the_headers(root: Path) -> None:
    folder = FrameFolder(root / "train", None)
    assert folder.lengths == [len(folder[index][0]) for index in range(len(folder))]
    assert FrameFolder(root / "train", 4).lengths is None
    (root / "train/class1/3.npz").write_bytes(b"damaged")
    assert FrameFolder(root / "train", None).lengths == [3 if length == 5 else length for length in folder.lengths]


def test_a_run_on_frames_of_several_t_is_exact(root: Path, tmp_path: Path) -> None:
    trained = vision.train(
        vision.TrainingConfig(**settings(root, batch_size=3, epochs=2, checkpoint_dir=tmp_path / "runs"))
    )
    assert trained["step"] == 2 * sum(-(-LENGTHS.count(length) // 3) for length in set(LENGTHS))
    (path,) = list((tmp_path / "runs").glob("step-*"))[-1:]
    found = {}
    for batch in (1, 4):
        config = settings(root, checkpoint=path, batch_size=batch)
        found[batch] = vision.evaluate(vision.EvaluationConfig(**config))
    assert found[4]["samples"] == len(LENGTHS)
    assert found[4]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert found[4]["loss"] == pytest.approx(trained["validation_loss"], rel=1e-6)
    config = settings(root, checkpoint=path, output=tmp_path / "answers.h5", batch_size=4)
    with h5py.File(vision.predict(vision.PredictionConfig(**config))) as file:
        assert file["index"][:].tolist() == list(range(len(LENGTHS)))


def test_without_lengths_the_message_names_them() -> None:
    data = [(torch.rand(t, 2, 4, 4), 0) for t in LENGTHS]
    with pytest.raises(ConfigError, match="`lengths`, the T of each sample"):
        vision.train(
            vision.TrainingConfig(
                model=Frames, dataset=lambda: (data, data), input_layout="NTCHW", batch_size=8, verify="off"
            )
        )


def test_a_sample_that_is_skipped_is_stood_for_by_one_of_its_t(root: Path) -> None:
    damaged = root / "train/class1/3.npz"
    damaged.write_bytes(b"damaged")
    training, _, _ = open_frames(root, None)
    assert len(training) == len(LENGTHS)  # type: ignore[arg-type]
    found = vision.train(vision.TrainingConfig(**settings(root, batch_size=4, on_bad_sample="skip")))
    assert np.isfinite(found["train_loss"])
