"""What can be wrong with data is found before the first step: empty parts, odd samples, labels out of range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from snnpart.errors import ConfigError
from snnpart.vision.data.loader import Samples


def check_samples(samples: Samples, name: str) -> Tensor:
    """The first sample, after the part was seen not to be empty.

    Raises:
        ConfigError: no samples, one that cannot be read or does not fit the layout, or one that is not finite.
    """
    check_not_empty(samples, name)
    x, _, index, _ = samples[0]
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise ConfigError(f"sample {index} of the {name} part holds NaN or Inf")
    return x


def check_not_empty(data: Any, name: str) -> None:
    """ConfigError for a part without samples."""
    if not len(data):
        raise ConfigError(f"the {name} part of the data is empty", fix="give it at least one sample")


def check_labels(targets: Any, classes: int, indices: tuple[int, ...]) -> None:
    """ConfigError names the first class number outside [0, classes); targets that are no class numbers pass."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() != 1:
        return
    wrong = (targets < 0) | (targets >= classes)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ConfigError(
            f"sample {indices[at]} has target {int(targets[at])}, the network has {classes} outputs",
            fix="number the classes from 0, or give the network as many outputs as there are classes",
        )


def check_all_labels(data: Any, classes: int | None) -> None:
    """`check_labels` of the whole data set where its targets lie in memory; `classes` None: there are no classes."""
    targets = _held_targets(data)
    if targets is not None and classes is not None:
        check_labels(targets, classes, tuple(range(len(targets))))


def _held_targets(data: Any) -> Tensor | None:
    if isinstance(data, Subset):
        whole = _held_targets(data.dataset)
        return None if whole is None else whole[torch.as_tensor(list(data.indices))]
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[1]
    held = getattr(data, "targets", None)
    return torch.as_tensor(held) if isinstance(held, (list, Tensor)) and len(held) else None
