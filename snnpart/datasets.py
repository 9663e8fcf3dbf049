"""Data for `snnpart run`: samples first on disk, in the program's own layout when they come out.

`digits` is scikit-learn's set of 1797 handwritten digits, 8 x 8 pixels, resized to the input's height and width and
repeated over its channels and its time steps; the last fifth of a fixed shuffle is kept for validation. An `.npz` file
holds one array per program input, by its name (`inputs` will do when there is one), and `targets`, all with the samples
along dim 0 and the other dims in the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart.errors import ConfigError
from snnpart.graph import InputInfo

_VALIDATION = 0.2


@dataclass(frozen=True)
class Dataset:
    """Inputs, one tensor per program input, and targets (None: there are none); samples along dim 0."""

    inputs: tuple[Tensor, ...]
    targets: Tensor | None
    infos: tuple[InputInfo, ...]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def take(self, index: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The samples at `index`: inputs with their batch dim where the program has it, and targets."""
        pairs = zip(self.inputs, self.infos, strict=True)
        inputs = tuple(x[index].movedim(0, i.batch_dim or 0).contiguous().to(i.dtype) for x, i in pairs)
        return inputs, None if self.targets is None else self.targets[index]

    def split(self) -> tuple[Dataset, Dataset]:
        """Training and validation part of a fixed shuffle."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        cut = len(self) - int(len(self) * _VALIDATION)
        return self._part(order[:cut]), self._part(order[cut:])

    def _part(self, index: Tensor) -> Dataset:
        targets = None if self.targets is None else self.targets[index]
        return Dataset(tuple(x[index] for x in self.inputs), targets, self.infos)


def read(name: str, infos: Sequence[InputInfo]) -> Dataset:
    """The data set `digits`, or an .npz file.

    Raises:
        ConfigError: the file or an array is missing, or a shape does not fit the program's input.
    """
    return _digits(infos) if name == "digits" else _npz(Path(name), tuple(infos))


def _npz(path: Path, infos: tuple[InputInfo, ...]) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="give 'digits' or an .npz file") from error
    names = ["inputs" if len(infos) == 1 and info.name not in arrays else info.name for info in infos]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ConfigError(f"{path} holds no array {missing}", choices=[*(info.name for info in infos), "targets"])
    for name, info in zip(names, infos, strict=True):
        _check_shape(name, tuple(arrays[name].shape), info)
    return Dataset(tuple(arrays[name] for name in names), arrays.get("targets"), infos)


def _check_shape(name: str, shape: tuple[int, ...], info: InputInfo) -> None:
    if info.batch_dim is None:
        raise ConfigError(f"input '{info.name}' has no batch dim, so samples cannot be taken from a file")
    wanted = tuple(size for dim, size in enumerate(info.shape) if dim != info.batch_dim)
    if shape[1:] != wanted:
        raise ConfigError(
            f"a sample of array '{name}' has shape {shape[1:]}, the program's input '{info.name}' takes {wanted}",
            fix="put the samples along dim 0 and the other dims in the program's order",
        )


def _digits(infos: Sequence[InputInfo]) -> Dataset:
    if len(infos) != 1 or infos[0].batch_dim is None:
        raise ConfigError(f"'digits' fits a program with one batched input, this one has {len(infos)}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "'digits' comes with scikit-learn, which is missing", fix="pip install scikit-learn"
        ) from error
    info, data = infos[0], load_digits()
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    return Dataset((_shaped(images, info),), torch.from_numpy(data.target).long(), (info,))


def _shaped(images: Tensor, info: InputInfo) -> Tensor:
    """[N, 1, 8, 8] as the input wants it: flat, or channels, height and width, repeated over time; samples first."""
    rest = [size for dim, size in enumerate(info.shape) if dim not in (info.batch_dim, info.time_dim)]
    if len(rest) == 3:
        x = F.interpolate(images, size=(rest[1], rest[2]), mode="bilinear").expand(-1, rest[0], -1, -1)
    elif rest == [64]:
        x = images.flatten(1)
    else:
        raise ConfigError(
            f"'digits' cannot fill input '{info.name}' of shape {list(info.shape)}",
            fix="use an input of [channels, height, width] or of 64 features a sample",
        )
    if info.time_dim is None:
        return x
    at = info.time_dim + (info.batch_dim is not None and info.batch_dim > info.time_dim)
    return x.unsqueeze(at).repeat_interleave(info.shape[info.time_dim], at)
