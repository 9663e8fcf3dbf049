"""Event frames on disk, one file a sample: .npz with `frames`, .npy, or HDF5, as the usual data set tools write them.

root/[train|test]/CLASS/sample.npz      frames [T, C, H, W], uint8 or any number
"""

from __future__ import annotations

import zipfile
from functools import cached_property
from pathlib import Path
from typing import IO, Any

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

    @cached_property
    def lengths(self) -> list[int] | None:
        """T of every sample, from the files' headers; None where `frames` fixes it. A file without a header that can be
        read counts as of the commonest T."""
        if self._frames is not None:
            return None
        found = [_length(path) for path, _ in self.files]
        known = [length for length in found if length is not None]
        usual = max(set(known), key=known.count) if known else 0
        return [usual if length is None else length for length in found]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, target = self.files[index]
        frames = read_frames(path)
        if self._frames is not None and len(frames) != self._frames:
            raise ConfigError(f"{path} holds {len(frames)} frames, not {self._frames}", fix="frames=None takes any T")
        return frames, target


def _length(path: Path) -> int | None:
    """T of the frames in one file, without reading them."""
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive, archive.open("frames.npy") as member:
                return _leading(member)
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return _leading(file)
        with h5py.File(path, "r") as file:
            return int((file["frames"] if "frames" in file else file[next(iter(file))]).shape[0])
    except Exception:  # what is wrong with it is said when it is read
        return None


def _leading(file: IO[bytes]) -> int:
    """The first size of the array in a .npy file."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, _ = read(file)
    return int(shape[0])


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
