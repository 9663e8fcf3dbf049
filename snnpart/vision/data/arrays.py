"""Samples in one .npz or HDF5 file. HDF5 is read sample by sample, each process with a handle of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from snnpart.errors import ConfigError

_HDF5 = (".h5", ".hdf5")


def open_arrays(path: Path, inputs: str, targets: str) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Training samples, and validation samples where the file holds `validation_...` arrays.

    Raises:
        ConfigError: the file or an array is missing, or inputs and targets differ in length.
    """
    open_one = _hdf5 if path.suffix in _HDF5 else _npz
    names = _names(path)
    for name in (inputs, targets):
        if name not in names:
            raise ConfigError(f"{path} holds no array {name!r}", choices=names)
    kept = (f"validation_{inputs}", f"validation_{targets}")
    return open_one(path, inputs, targets), open_one(path, *kept) if set(kept) <= set(names) else None


def _names(path: Path) -> list[str]:
    try:
        if path.suffix in _HDF5:
            with h5py.File(path, "r") as file:
                return sorted(file)
        with np.load(path, allow_pickle=False) as file:
            return sorted(file.files)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="give an .npz, .h5 or .hdf5 file") from error


def _npz(path: Path, inputs: str, targets: str) -> Dataset[Any]:
    with np.load(path, allow_pickle=False) as file:
        x, y = torch.from_numpy(file[inputs]), torch.from_numpy(file[targets])
    _check_lengths(path, len(x), len(y))
    return TensorDataset(x, y)


def _hdf5(path: Path, inputs: str, targets: str) -> Dataset[Any]:
    with h5py.File(path, "r") as file:
        _check_lengths(path, len(file[inputs]), len(file[targets]))
    return HDF5Samples(path, inputs, targets)


def _check_lengths(path: Path, inputs: int, targets: int) -> None:
    if inputs != targets:
        raise ConfigError(f"{path} holds {inputs} inputs and {targets} targets")


class HDF5Samples(Dataset[Any]):
    """Samples of an HDF5 file, read when they are asked for. The file is opened once in each process."""

    def __init__(self, path: Path, inputs: str, targets: str) -> None:
        self._path, self._names = path, (inputs, targets)
        self._file: h5py.File | None = None
        with h5py.File(path, "r") as file:
            self._length = len(file[inputs])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = (self._read(name, index) for name in self._names)
        return x, y

    def inputs_of(self, index: int) -> Tensor:
        """The sample without its target, which is not read."""
        return self._read(self._names[0], index)

    def _read(self, name: str, index: int) -> Tensor:
        if self._file is None:
            self._file = h5py.File(self._path, "r")
        return torch.as_tensor(np.asarray(self._file[name][index]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
