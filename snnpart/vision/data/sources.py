"""Built-in data, each a factory that gives a `Split` of training and validation samples.

A sample is `(x, y)`: an image [C, H, W] or frames [T, C, H, W], and a whole number (or a tensor) as target. A user's
own factory, given by its import path, returns `(training, validation)`, a dict of them, or one data set, of which a
part is kept for validation. Anything with `__len__` and `__getitem__` will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from snnpart.errors import ConfigError

Sample = tuple[Tensor, Any]


@dataclass(frozen=True)
class Split:
    """The samples to train on and those to validate with, and the names of the classes if they are known."""

    training: Dataset[Any]
    validation: Dataset[Any]
    classes: tuple[str, ...] = ()


def digits(size: int = 8, channels: int = 1, validation: float = 0.2) -> Split:
    """scikit-learn's 1797 handwritten digits, [channels, size, size] in [0, 1], 10 classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("'digits' comes with scikit-learn", fix="pip install scikit-learn") from error
    data = load_digits()
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    images = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    targets = torch.from_numpy(data.target).long()
    images = images.expand(-1, channels, -1, -1).contiguous()
    return split(TensorDataset(images, targets), validation, classes=tuple("0123456789"))


def synthetic(
    samples: int = 256,
    shape: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    validation: float = 0.2,
    distinct: int = 64,
    seed: int = 0,
) -> Split:
    """Random samples of `shape` with random targets; only `distinct` of them are made and taken in turn."""
    generator = torch.Generator().manual_seed(seed)
    count = min(samples, distinct)
    x = torch.rand(count, *shape, generator=generator)
    y = torch.randint(0, classes, (count,), generator=generator)
    return split(Repeated(TensorDataset(x, y), samples), validation)


class Repeated(Dataset[Any]):
    """`length` samples from a smaller data set, taken in turn."""

    def __init__(self, source: Any, length: int) -> None:
        self.source, self.length = source, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.source[index % len(self.source)]


def arrays(path: str, validation: float = 0.2, inputs: str = "inputs", targets: str = "targets") -> Split:
    """An .npz or HDF5 file with an array of samples (first axis) and one of targets.

    `validation_inputs` and `validation_targets`, where the file holds them, are the validation part.
    """
    from snnpart.vision.data.arrays import open_arrays

    train, kept = open_arrays(Path(path), inputs, targets)
    return split(train, validation) if kept is None else Split(train, kept)


def image_folder(root: str, size: int = 224, validation: float = 0.2, augment: bool = True) -> Split:
    """Images in a folder a class (`root/train` and `root/val` where they exist); ImageNet's crops and normalisation."""
    from snnpart.vision.data.images import open_images

    training, kept, classes = open_images(Path(root), size, augment)
    if kept is not None:
        return Split(training, kept, classes)
    plain = open_images(Path(root), size, augment=False)[0]
    order, cut = _shuffled(len(training), validation)  # type: ignore[arg-type]
    return Split(Subset(training, order[:cut]), Subset(plain, order[cut:]), classes)


def dvs_frames(root: str, frames: int | None = None, validation: float = 0.2) -> Split:
    """Event frames [T, C, H, W], one .npz or .npy file a sample in a folder a class (`root/train`, `root/test`).

    A .npz or HDF5 file holds them as `frames`, a .npy file as it is.
    """
    from snnpart.vision.data.frames import open_frames

    training, kept, classes = open_frames(Path(root), frames)
    return split(training, validation, classes) if kept is None else Split(training, kept, classes)


SOURCES: Mapping[str, Callable[..., Split]] = {
    "digits": digits,
    "synthetic": synthetic,
    "arrays": arrays,
    "image_folder": image_folder,
    "dvs_frames": dvs_frames,
}


def split(data: Any, validation: float, classes: tuple[str, ...] = ()) -> Split:
    """The last `validation` part of a fixed shuffle is kept for validation.

    Raises:
        ConfigError: a part would be empty.
    """
    order, cut = _shuffled(len(data), validation)
    return Split(Subset(data, order[:cut]), Subset(data, order[cut:]), classes)


def _shuffled(length: int, validation: float) -> tuple[list[int], int]:
    if not 0 < validation < 1:
        raise ConfigError(f"validation = {validation} is not between 0 and 1", fix="0.2 keeps a fifth")
    kept = max(1, int(length * validation))
    if length - kept < 1:
        raise ConfigError(f"{length} samples cannot be cut into training and validation", fix="give more samples")
    return torch.randperm(length, generator=torch.Generator().manual_seed(0)).tolist(), length - kept


def as_split(made: Any) -> Split:
    """What a user's factory returned, as a `Split`."""
    if isinstance(made, Split):
        return made
    if isinstance(made, Mapping) and {"train", "validation"} <= set(made):
        return Split(made["train"], made["validation"])
    if isinstance(made, (tuple, list)) and len(made) == 2:
        return Split(made[0], made[1])
    if hasattr(made, "__getitem__") and hasattr(made, "__len__"):
        return split(made, 0.2)
    raise ConfigError(
        f"the dataset factory gave a {type(made).__name__}",
        fix="return (training, validation), each with __len__ and __getitem__",
    )


def tensor_of(x: Any) -> Tensor:
    """A sample's array as a tensor; ConfigError where it is neither tensor nor array."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, (np.ndarray, np.generic, int, float)):
        return torch.as_tensor(np.asarray(x))
    raise ConfigError(
        f"a sample is a {type(x).__name__}, not a tensor or an array",
        fix="convert it in the data set, for images with torchvision.transforms.ToTensor()",
    )
