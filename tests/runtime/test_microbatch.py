"""Batches into microbatches and back."""

from __future__ import annotations

import pytest
import torch

from snnpart.errors import ConfigError
from snnpart.graph import InputInfo, OutputInfo
from snnpart.runtime import microbatch
from tests.distributed.handmade import make_net, source_of


def test_part_sizes_differ_by_one_at_most() -> None:
    assert microbatch.part_sizes(8, 3) == [3, 3, 2]
    assert microbatch.part_sizes(3, 3) == [1, 1, 1]
    with pytest.raises(ConfigError, match="a batch of 2 samples cannot be cut into 3 microbatches"):
        microbatch.part_sizes(2, 3)


def test_inputs_must_agree_on_the_batch() -> None:
    infos = [InputInfo("x", (4, 2), torch.float32, 0), InputInfo("y", (3, 4), torch.float32, 1)]
    assert microbatch.batch_size([torch.zeros(5, 2), torch.zeros(3, 5)], infos) == 5
    with pytest.raises(ConfigError, match="different batch sizes: {'x': 5, 'y': 4}"):
        microbatch.batch_size([torch.zeros(5, 2), torch.zeros(3, 4)], infos)


def test_nested_targets_are_cut_and_constants_kept() -> None:
    parts = microbatch.split_nested({"a": torch.arange(5), "k": 3}, 0, [3, 2])
    assert [part["a"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["k"] for part in parts] == [3, 3]


def test_merge_puts_outputs_together_where_their_batch_is() -> None:
    source = source_of(make_net())
    source.outputs = (OutputInfo("a", 1), OutputInfo("rate", None), OutputInfo("count", None))
    parts = [(torch.full((2, n, 3), float(n)), torch.tensor(float(n)), torch.tensor(7)) for n in (3, 1)]
    merged = microbatch.merge(parts, source, [3, 1])
    assert merged[0].shape == (2, 4, 3)
    assert merged[1].item() == pytest.approx(3 * 0.75 + 1 * 0.25)
    assert merged[2].item() == 7
