"""Built-in data: what they hold, how they are cut, and files that are not as they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from snnpart.errors import ConfigError
from snnpart.vision.build import make_data
from snnpart.vision.config import TrainingConfig
from snnpart.vision.data.sources import SOURCES, Split, as_split


def data_of(name: str, **keywords: Any) -> Split:
    return make_data(TrainingConfig(model="x:y", dataset=name, dataset_kwargs=keywords))


def test_digits() -> None:
    split = data_of("digits", size=16, channels=3)
    x, y = split.training[0]
    assert x.shape == (3, 16, 16) and float(x.min()) >= 0 and float(x.max()) <= 1 and 0 <= int(y) < 10
    assert len(split.training) + len(split.validation) == 1797  # type: ignore[arg-type]
    assert len(split.classes) == 10


def test_synthetic_is_the_same_everywhere() -> None:
    first, again = (data_of("synthetic", samples=100, shape=[4, 2, 8, 8], distinct=10) for _ in range(2))
    assert torch.equal(first.training[3][0], again.training[3][0])
    assert first.training[0][0].shape == (4, 2, 8, 8)
    assert len(first.training) == 80  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", ["npz", "h5"])
@pytest.mark.parametrize("with_validation", [False, True])
def test_arrays(tmp_path: Path, suffix: str, with_validation: bool) -> None:
    x, y = np.random.default_rng(0).random((10, 1, 2, 2)), np.arange(10)
    arrays = {"inputs": x, "targets": y}
    if with_validation:
        arrays |= {"validation_inputs": x[:3], "validation_targets": y[:3]}
    path = tmp_path / f"data.{suffix}"
    if suffix == "npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array
    split = data_of("arrays", path=str(path))
    assert len(split.training) == (10 if with_validation else 8)  # type: ignore[arg-type]
    assert len(split.validation) == (3 if with_validation else 2)  # type: ignore[arg-type]
    image, target = split.training[1]
    assert np.array_equal(image, x[int(target)])


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((3, 2)), labels=np.zeros(3))
    with pytest.raises(ConfigError, match="holds no array 'targets'\n  valid: inputs, labels"):
        data_of("arrays", path=str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", inputs=np.zeros((3, 2)), targets=np.zeros(4))
    with pytest.raises(ConfigError, match="holds 3 inputs and 4 targets"):
        data_of("arrays", path=str(tmp_path / "b.npz"))
    (tmp_path / "c.npz").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"c\.npz cannot be read"):
        data_of("arrays", path=str(tmp_path / "c.npz"))


def frames(root: Path, parts: tuple[str, ...] = ("train", "test"), steps: int = 4) -> Path:
    for part in parts:
        for label in ("left", "right"):
            folder = root / part / label
            folder.mkdir(parents=True)
            for i in range(2):
                np.savez(folder / f"{i}.npz", frames=np.full((steps, 2, 3, 3), i, dtype=np.uint8))
            np.save(folder / "2.npy", np.full((steps, 2, 3, 3), 2, dtype=np.uint8))
            with h5py.File(folder / "3.h5", "w") as file:
                file["frames"] = np.full((steps, 2, 3, 3), 3, dtype=np.uint8)
    return root


def test_dvs_frames(tmp_path: Path) -> None:
    split = data_of("dvs_frames", root=str(frames(tmp_path)), frames=4)
    assert split.classes == ("left", "right") and len(split.training) == len(split.validation) == 8  # type: ignore[arg-type]
    for i in range(8):
        x, y = split.training[i]
        assert x.shape == (4, 2, 3, 3) and int(x.max()) == i % 4 and y == i // 4


def test_dvs_frames_that_do_not_fit(tmp_path: Path) -> None:
    root = frames(tmp_path)
    with pytest.raises(ConfigError, match=r"0\.npz holds 4 frames, not 8"):
        data_of("dvs_frames", root=str(root), frames=8).training[0]
    (root / "train" / "left" / "0.npz").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"0\.npz cannot be read"):
        data_of("dvs_frames", root=str(root)).training[0]
    (root / "test" / "up").mkdir()
    with pytest.raises(ConfigError, match="holds class 'up', which the training part does not"):
        data_of("dvs_frames", root=str(root))
    with pytest.raises(ConfigError, match="is not a folder"):
        data_of("dvs_frames", root=str(tmp_path / "nothing"))


def test_image_folder(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for part, count in (("train", 3), ("val", 2)):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for i in range(count):
                images.new("RGB", (40, 30), (i * 50, 0, 0)).save(tmp_path / part / label / f"{i}.png")
    split = data_of("image_folder", root=str(tmp_path), size=16)
    assert split.classes == ("cat", "dog")
    assert (len(split.training), len(split.validation)) == (6, 4)  # type: ignore[arg-type]
    assert split.training[0][0].shape == split.validation[0][0].shape == (3, 16, 16)
    single = data_of("image_folder", root=str(tmp_path / "train"), size=16, validation=0.5)
    assert (len(single.training), len(single.validation)) == (3, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="put the images of each class into a folder of its own"):
        data_of("image_folder", root=str(tmp_path / "nothing"))


def test_what_a_users_factory_may_return() -> None:
    pairs = [(torch.rand(2), 0)] * 10
    assert len(as_split((pairs, pairs[:3])).validation) == 3  # type: ignore[arg-type]
    assert len(as_split({"train": pairs, "validation": pairs[:2]}).validation) == 2  # type: ignore[arg-type]
    assert len(as_split(pairs).training) == 8  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the dataset factory gave a int"):
        as_split(3)
    with pytest.raises(ConfigError, match="cannot be cut into training and validation"):
        as_split(pairs[:1])


def test_every_source_documents_itself() -> None:
    assert all(source.__doc__ for source in SOURCES.values())
