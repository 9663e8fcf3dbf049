"""Batches of samples in the model's layout, the same on all ranks of a data-parallel coordinate.

Every rank of a tp group or a pipeline reads the same samples; random augmentation must agree between them and must not
depend on the number of workers or on where a run was interrupted. So a sample is read with random generators that are
seeded by the run's seed, the epoch and its index, and those of the process are put back.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from snnpart.errors import ConfigError, LaunchError
from snnpart.layout import BATCH, TIME
from snnpart.vision.data.sampler import Share, Shares
from snnpart.vision.data.sources import tensor_of

_log = logging.getLogger("snnpart")
_PREFETCHED = 4


@dataclass(frozen=True)
class Batch:
    """This rank's part of a step. `real` of its rows count; `indices` are those of all its rows; `skipped` samples
    before it are left out."""

    inputs: Tensor
    targets: Any
    indices: tuple[int, ...]
    counted: Tensor
    together: int
    skipped: int = 0

    @property
    def real(self) -> int:
        return int(self.counted.sum())


@dataclass(frozen=True)
class Layout:
    """How samples become a batch.

    Args:
        letters: the input layout of the model, e.g. NTCHW; samples have its dims without N.
        time_steps: an image (a sample without T) is repeated so often where the layout has T.
        cast: make whole numbers float32.
    """

    letters: str
    time_steps: int | None = None
    cast: bool = True

    def sample(self, x: Any, index: int) -> Tensor:
        """One sample as the batch takes it.

        Raises:
            ConfigError: a wrong number of dims, or another T than `time_steps`.
        """
        x = tensor_of(x)
        if self.cast and not x.is_floating_point():
            x = x.float()
        letters = self.letters.replace(BATCH, "")
        at = letters.find(TIME)
        if at >= 0 and x.dim() == len(letters) - 1 and self.time_steps is not None:
            return x.unsqueeze(at).expand(*x.shape[:at], self.time_steps, *x.shape[at:])
        if x.dim() != len(letters):
            raise ConfigError(
                f"sample {index} has shape {tuple(x.shape)}, {len(letters)} dims are wanted: {' '.join(letters)}",
                fix="choose the input_layout that fits the samples (without N), "
                + ("or set time_steps to repeat images" if at >= 0 else "or reshape them in the data set"),
            )
        if at >= 0 and self.time_steps not in (None, x.shape[at]):
            raise ConfigError(
                f"sample {index} has {x.shape[at]} time steps, time_steps = {self.time_steps}",
                fix="leave time_steps out, or write frames of that number",
            )
        return x

    def batch(self, samples: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
        """The samples along N; ConfigError names the first one of another shape."""
        for x, index in zip(samples, indices, strict=True):
            if x.shape != samples[0].shape:
                raise ConfigError(
                    f"sample {index} has shape {tuple(x.shape)}, sample {indices[0]} {tuple(samples[0].shape)}: "
                    "they cannot be in one batch",
                    fix="give all samples one size, or batch_size = 1; for frames of several T give the data set "
                    "`lengths`, the T of each sample",
                )
        return torch.stack(list(samples), self.letters.index(BATCH))


class Samples(Dataset[Any]):
    """A user's data set, read so that a sample is the same wherever and whenever it is read.

    Args:
        skip: a sample that cannot be read is replaced by the next one that can, and does not count.
        targets: False: give none; where the data set has `inputs_of(index)`, nothing of them is read.
        chosen: the samples to take, by their indices in the data set; None: all.
    """

    def __init__(
        self,
        source: Any,
        layout: Layout,
        seed: tuple[int, int],
        skip: bool,
        targets: bool = True,
        chosen: Sequence[int] | None = None,
    ) -> None:
        self._source, self._layout, self._seed, self._skip, self._targets = source, layout, seed, skip, targets
        self._chosen: Sequence[int] = range(len(source)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @cached_property
    def lengths(self) -> tuple[int, ...] | None:
        """T of every sample where the data set says it (`lengths`), the model takes any, and they differ."""
        if TIME not in self._layout.letters or self._layout.time_steps is not None:
            return None
        whole = _lengths(self._source)
        found = None if whole is None else tuple(whole[index] for index in self._chosen)
        return found if found and len(set(found)) > 1 else None

    def _instead_of(self, position: int) -> Iterator[int]:
        """The sample itself, then those that can stand for it: the later ones of its T."""
        for later in range(len(self)):
            other = (position + later) % len(self)
            if self.lengths is None or self.lengths[other] == self.lengths[position]:
                yield self._chosen[other]

    def __getitem__(self, position: int) -> tuple[Tensor, Any, int, bool]:
        for later, index in enumerate(self._instead_of(position)):
            try:
                return *self._read(index), self._chosen[position], later == 0
            except Exception as error:
                if not self._skip:
                    raise _unreadable(index, error) from error
                _log.warning("sample %d is skipped: %s", index, error)
        raise ConfigError("no sample can be read")

    def _read(self, index: int) -> tuple[Tensor, Any]:
        with _seeded(*self._seed, index):
            holder, place = _holder(self._source, index)
            if not self._targets and hasattr(holder, "inputs_of"):
                return self._layout.sample(holder.inputs_of(place), index), 0
            found = self._source[index]
        if not (isinstance(found, (tuple, list)) and len(found) == 2):
            raise ConfigError(f"sample {index} is a {type(found).__name__}, not a pair (x, y)")
        return self._layout.sample(found[0], index), found[1] if self._targets else 0


def _lengths(source: Any) -> Sequence[int] | None:
    """What the data set under torch's `Subset` and `ConcatDataset` says of its samples' T."""
    if type(source) is Subset:
        whole = _lengths(source.dataset)
        return None if whole is None else [whole[index] for index in source.indices]
    if type(source) is ConcatDataset:
        parts = [_lengths(part) for part in source.datasets]
        return [length for part in parts if part is not None for length in part] if None not in parts else None
    return getattr(source, "lengths", None)


def _holder(source: Any, index: int) -> tuple[Any, int]:
    """The data set under torch's `Subset` and `ConcatDataset` that holds the sample, and the sample's index in it."""
    while type(source) in (Subset, ConcatDataset):
        if isinstance(source, Subset):
            source, index = source.dataset, source.indices[index]
        else:
            part = bisect_right(source.cumulative_sizes, index)
            source, index = source.datasets[part], index - (source.cumulative_sizes[part - 1] if part else 0)
    return source, index


def _unreadable(index: int, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(
        f"sample {index} cannot be read: {type(error).__name__}: {error}",
        fix='mend or remove it, or set on_bad_sample = "skip"',
    )


class _seeded:  # noqa: N801 - used as a context manager
    """Random generators of torch, numpy and Python that depend on the numbers alone, and are put back."""

    def __init__(self, *numbers: int) -> None:
        self._seed = int(np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1)[0])

    def __enter__(self) -> None:
        self._before = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        torch.default_generator.manual_seed(self._seed)
        np.random.seed(self._seed)
        random.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._before[0])
        np.random.set_state(self._before[1])
        random.setstate(self._before[2])


@dataclass(frozen=True)
class _Told(Dataset[Any]):
    """Samples, or the error of one that cannot be read: an error raised in a worker arrives as the text of its whole
    traceback, one that is handed over arrives as itself."""

    samples: Samples

    def __getitem__(self, position: int) -> Any:
        try:
            return self.samples[position]
        except ConfigError as error:
            return error


_Rows = tuple[Tensor, Any, tuple[int, ...], Tensor]


@dataclass(frozen=True)
class _Collate:
    layout: Layout

    def __call__(self, rows: list[Any]) -> _Rows | ConfigError:
        for row in rows:
            if isinstance(row, ConfigError):
                return row
        xs, ys, indices, counted = zip(*rows, strict=True)
        try:
            return self.layout.batch(xs, indices), _targets(ys, indices), tuple(indices), torch.tensor(counted)
        except ConfigError as error:
            return error


def _targets(rows: Sequence[Any], indices: Sequence[int]) -> Any:
    """The targets as a batch; whole numbers of any width as int64, which torch's losses take class numbers in.

    Raises:
        ConfigError: they cannot be stacked.
    """
    try:
        found = default_collate(list(rows))
    except (RuntimeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the targets of samples {list(indices)} cannot be in one batch: {error}",
            fix="give all targets one type and size, or batch_size = 1",
        ) from error
    if not isinstance(found, Tensor) or found.dtype.is_floating_point or found.dtype in (torch.bool, torch.complex64):
        return found
    return found.long()


@dataclass(frozen=True)
class Loader:
    """Batches of this rank for the steps of one pass.

    Args:
        workers: processes that read ahead; 0: this one.
        pin: page-locked memory, from which a GPU copies while it computes.
    """

    samples: Samples
    shares: Shares
    layout: Layout
    workers: int = 0
    pin: bool = False

    def __len__(self) -> int:
        return len(self.shares)

    @property
    def samples_left(self) -> int:
        """Samples of all ranks that the whole pass takes."""
        return self.shares.taken

    def __iter__(self) -> Iterator[Batch]:
        steps: list[Share] = list(self.shares)
        loader: DataLoader[Any] = DataLoader(
            _Told(self.samples),
            batch_sampler=[list(step.indices) for step in steps],
            collate_fn=_Collate(self.layout),
            num_workers=self.workers,
            pin_memory=self.pin,
            prefetch_factor=_PREFETCHED if self.workers else None,
            generator=torch.Generator(),
        )
        for step, found in zip(steps, _surviving(loader), strict=True):
            if isinstance(found, ConfigError):
                raise found
            x, y, indices, counted = found
            real = counted & (torch.arange(len(counted)) < step.real)
            yield Batch(x, y, indices, real, step.together, step.skipped)


def _surviving(loader: DataLoader[Any]) -> Iterator[_Rows | ConfigError]:
    """What the loader gives; that a worker ended is said without its traceback."""
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise LaunchError(
            f"a process that loads data has ended: {str(error).splitlines()[0]}",
            fix="give more memory (in a container also shared memory, --shm-size), or set workers = 0",
        ) from error
