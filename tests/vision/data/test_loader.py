"""Batches in the model's layout; samples that do not fit; augmentation that is the same wherever it is read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from snnpart.errors import ConfigError
from snnpart.vision.data.checks import check_all_labels, check_labels, check_samples
from snnpart.vision.data.loader import Batch, Layout, Loader, Samples
from snnpart.vision.data.sampler import Shares
from snnpart.vision.mixup import Mixup


class Noisy:
    """Samples with random augmentation of all three generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(2) + float(np.random.rand()) + random.random(), index


class Holey:
    """The second sample cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 1:
            raise OSError("truncated file img_1.png")
        return torch.full((3,), float(index)), index


def batches(data: Any, layout: Layout, batch: int = 2, workers: int = 0, skip: bool = False) -> list[Batch]:
    samples = Samples(data, layout, (0, 0), skip)
    return list(Loader(samples, Shares(len(samples), batch), layout, workers))


@pytest.mark.parametrize(
    ("letters", "sample", "batch"),
    [
        ("NCHW", (3, 5, 6), (2, 3, 5, 6)),
        ("NTCHW", (4, 3, 5, 6), (2, 4, 3, 5, 6)),
        ("TNCHW", (4, 3, 5, 6), (4, 2, 3, 5, 6)),
        ("TNCHW", (3, 5, 6), (4, 2, 3, 5, 6)),
        ("NTCHW", (3, 5, 6), (2, 4, 3, 5, 6)),
    ],
)
def test_layouts(letters: str, sample: tuple[int, ...], batch: tuple[int, ...]) -> None:
    x = torch.rand(4, *sample)
    (first, _) = batches(TensorDataset(x, torch.arange(4)), Layout(letters, 4))
    assert first.inputs.shape == batch
    rows = first.inputs.movedim(letters.index("N"), 0)
    for row, wanted in zip(rows, x, strict=False):
        assert torch.equal(row, wanted.expand_as(row)), "an image is the same at every step"


def test_whole_numbers_become_floats_unless_told() -> None:
    frames = torch.randint(0, 9, (2, 3, 4), dtype=torch.uint8)
    data = TensorDataset(frames, torch.arange(2))
    assert batches(data, Layout("NCH"))[0].inputs.dtype == torch.float32
    assert batches(data, Layout("NCH", cast=False))[0].inputs.dtype == torch.uint8


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_seed_epoch_and_sample_alone(workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = torch.cat([batch.inputs for batch in batches(Noisy(), Layout("NF"), workers=workers)])
    assert torch.equal(before, torch.get_rng_state()), "the process's own generator was moved"
    torch.manual_seed(99)
    again = Samples(Noisy(), Layout("NF"), (0, 0), False)
    assert torch.equal(first[4], again[4][0])
    assert not torch.equal(first[4], Samples(Noisy(), Layout("NF"), (0, 1), False)[4][0])


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        batches(Holey(), Layout("NF"))
    assert "sample 1 cannot be read: OSError: truncated file img_1.png" in str(caught.value)
    assert 'on_bad_sample = "skip"' in str(caught.value)


def test_a_worker_that_raises_names_the_sample() -> None:
    with pytest.raises(ConfigError, match="sample 1 cannot be read: OSError: truncated file"):
        batches(Holey(), Layout("NF"), workers=2)


def test_a_sample_that_is_skipped_does_not_count() -> None:
    first, second = batches(Holey(), Layout("NF"), skip=True)
    assert first.counted.tolist() == [True, False] and first.real == 1
    assert torch.equal(first.inputs[1], second.inputs[0]), "its place is taken by the next one"
    assert second.real == 2


def test_a_wrong_number_of_dims_says_what_is_wanted() -> None:
    with pytest.raises(ConfigError, match="sample 0 has shape .3, 8, 8., 4 dims are wanted: T C H W"):
        batches(TensorDataset(torch.rand(2, 3, 8, 8), torch.arange(2)), Layout("NTCHW"))


def test_another_t_is_refused() -> None:
    with pytest.raises(ConfigError, match="sample 0 has 5 time steps, time_steps = 4"):
        batches(TensorDataset(torch.rand(2, 5, 1, 8, 8), torch.arange(2)), Layout("TNCHW", 4))


def test_samples_of_different_sizes_are_named() -> None:
    data = [(torch.rand(3), 0), (torch.rand(4), 1)]
    with pytest.raises(ConfigError, match=r"sample 1 has shape \(4,\), sample 0 \(3,\)"):
        batches(data, Layout("NF"))


def test_early_checks() -> None:
    with pytest.raises(ConfigError, match="the training part of the data is empty"):
        check_samples(Samples([], Layout("NF"), (0, 0), False), "training")
    with pytest.raises(ConfigError, match="sample 0 of the validation part holds NaN or Inf"):
        check_samples(Samples([(torch.tensor([float("nan")]), 0)], Layout("NF"), (0, 0), False), "validation")
    with pytest.raises(ConfigError, match="sample 7 has target 3, the network has 3 outputs"):
        check_labels(torch.tensor([0, 3]), 3, (5, 7))
    with pytest.raises(ConfigError, match="sample 1 has target -1"):
        check_all_labels(TensorDataset(torch.rand(2, 1), torch.tensor([0, -1])), 3)
    check_labels(torch.rand(4, 3), 3, (0, 1, 2, 3))


def test_mixup_mixes_inputs_and_targets_alike() -> None:
    x, y = torch.eye(4), torch.arange(4)
    batch = Batch(x, y, (0, 1, 2, 3), torch.ones(4, dtype=torch.bool), 4)
    mixed, targets = Mixup(1.0, 4)(batch, (0, 0), 0, "NF")
    assert torch.allclose(mixed, targets), "sample i is the unit vector of class i"
    assert torch.allclose(targets.sum(1), torch.ones(4))
    again, _ = Mixup(1.0, 4)(batch, (0, 0), 0, "NF")
    other, _ = Mixup(1.0, 4)(batch, (0, 1), 0, "NF")
    assert torch.equal(mixed, again) and not torch.equal(mixed, other)
    assert Mixup(0.0, 4)(batch, (0, 0), 0, "NF")[0] is x
