"""Event frames on disk, one file a sample: .npz with `frames`, .npy, or HDF5, as the usual data set tools write them.

root/[train|test]/CLASS/sample.npz      frames [T, C, H, W], uint8 or any number
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from snnpart.errors import ConfigError

_SUFFIXES = (".npz", ".npy", ".h5", ".hdf5")


def open_frames(root: Path, frames: int | None) -> tuple[Dataset[Any], Dataset[Any] | None, tuple[str, ...]]:
    """Training samples, test samples (None: no such folder) and the names of the classes."""
    held = next((root / name for name in ("test", "validation", "val") if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        first = FrameFolder(root, frames)
        return first, None, first.classes
    first = FrameFolder(root / "train", frames)
    return first, None if held is None else FrameFolder(held, frames, first.classes), first.classes


class FrameFolder(Dataset[Any]):
    """Samples [T, C, H, W] in a folder a class.

    Args:
        frames: T that every sample must have; None: as they are.
        classes: names in the order of their numbers; default: the folders, sorted.

    Raises:
        ConfigError: no folder, no sample, or a class that `classes` does not have.
    """

    def __init__(self, root: Path, frames: int | None, classes: tuple[str, ...] | None = None) -> None:
        if not root.is_dir():
            raise ConfigError(f"{root} is not a folder", fix="give the folder that holds a folder for each class")
        found = tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))
        self.classes, self._frames = classes or found, frames
        odd = [name for name in found if name not in self.classes]
        if odd:
            raise ConfigError(f"{root} holds class {odd[0]!r}, which the training part does not", choices=self.classes)
        self.files = [
            (path, self.classes.index(name))
            for name in found
            for path in sorted((root / name).iterdir())
            if path.suffix in _SUFFIXES
        ]
        if not self.files:
            raise ConfigError(f"{root} holds no frames", fix="write one .npz file with 'frames' for each sample")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, target = self.files[index]
        frames = read_frames(path)
        if self._frames is not None and len(frames) != self._frames:
            raise ConfigError(f"{path} holds {len(frames)} frames, not {self._frames}", fix="frames=None takes any T")
        return frames, target


def read_frames(path: Path) -> Tensor:
    """The frames in one file; ConfigError names the file where it is damaged."""
    try:
        if path.suffix in (".h5", ".hdf5"):
            with h5py.File(path, "r") as file:
                found = np.asarray(file["frames"] if "frames" in file else file[next(iter(file))])
        else:
            loaded = np.load(path, allow_pickle=False)
            found = loaded if isinstance(loaded, np.ndarray) else loaded["frames"]
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return torch.from_numpy(found)
