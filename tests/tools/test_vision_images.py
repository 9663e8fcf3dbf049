"""Images for the evaluations of both sides: real ones, always the same few, in the size and colours asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from snnpart.errors import ConfigError
from tools.bench.vision_images import IMAGES, images_of, repeated


def test_digits_are_enlarged_in_three_equal_channels() -> None:
    pytest.importorskip("sklearn")
    images, classes = images_of("digits", 40)
    assert images.shape == (IMAGES, 3, 40, 40) and len(classes) == IMAGES
    assert len(classes.unique()) == 10 and torch.equal(images[:, 0], images[:, 2])
    assert torch.equal(images, images_of("digits", 40)[0])
    assert images.std(dim=(1, 2, 3)).min() > 0.1  # not blank


def test_a_file_and_a_folder_are_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((10, 3, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "data.npz", inputs=pixels, targets=np.arange(10))
    images, classes = images_of(str(tmp_path / "data.npz"), 8)
    assert images.shape == (2, 3, 8, 8)
    assert torch.equal(images, torch.from_numpy(pixels)[classes])
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for name in ("cat", "dog"):
        folder = tmp_path / "pictures/val" / name
        folder.mkdir(parents=True)
        image.fromarray((pixels[0].transpose(1, 2, 0) * 255).astype("uint8")).save(folder / "one.png")
        (tmp_path / "pictures/train" / name).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(tmp_path / "pictures/train" / name / "one.png")
    images, classes = images_of(str(tmp_path / "pictures"), 16)
    assert images.shape == (2, 3, 16, 16) and classes.tolist() == [0, 1] and images[0].std() > 0.1


def test_what_is_no_image_or_not_known_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", inputs=np.zeros((10, 7), np.float32), targets=np.arange(10))
    with pytest.raises(ValueError, match=r"a sample has shape \[7\], not \[1 or 3, H, W\]"):
        images_of(str(tmp_path / "rows.npz"), 8)
    np.savez(tmp_path / "many.npz", inputs=np.zeros((10, 3, 8, 8), np.float32), targets=np.arange(10) + 1000)
    with pytest.raises(ValueError, match="but the networks have 1000"):
        images_of(str(tmp_path / "many.npz"), 8)
    with pytest.raises(ConfigError, match="images = 'nothing' is not known"):
        images_of("nothing", 8)


def test_a_batch_goes_round_among_them() -> None:
    assert repeated(torch.arange(3), 5, first=2).tolist() == [2, 0, 1, 2, 0]
    images, classes = images_of(None, 8)
    assert images.shape == (IMAGES, 3, 8, 8) and int(classes.max()) < 1000
