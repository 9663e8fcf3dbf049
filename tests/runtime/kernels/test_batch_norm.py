"""BatchNorm by kernels is torch's: in Triton's interpreter; what is left to torch's kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from snnpart import ops
from snnpart.runtime.kernels import batch_norm as kernels
from snnpart.runtime.kernels.tiles import columns_for, folded_tiles
from tests.runtime.kernels.norms import CASES, Case
from tests.runtime.kernels.test_fused_neuron import lines_of, pytestmark

__all__ = ["pytestmark"]


def test_results_gradients_and_running_statistics_are_torch_s() -> None:
    lines: list[dict[str, Any]] = lines_of("", "norms")
    assert len(lines) == len(CASES)
    for line in lines:
        case = line.pop("case")
        assert line.pop("takes"), case
        assert {name: off for name, off in line.items() if off > 1e-11} == {}, case


@pytest.mark.parametrize(("channels", "fold"), [(24, 8), (48, 4), (96, 2), (64, 1), (1152, 1), (1, 32)])
def test_few_channels_fill_the_lanes_with_several_rows(channels: int, fold: int) -> None:
    tiles, found = folded_tiles(4096 * channels, channels, 1024, sums=True)
    assert found == fold and (tiles.rows, tiles.channels) == (4096 // fold, channels * fold)
    assert folded_tiles(7 * channels, channels, 1024, sums=True)[1] == 1, "seven rows cannot be put together"
    assert columns_for(tiles.programs * fold) * tiles.programs * fold <= 2**13


@pytest.mark.parametrize("rows", [2**20, 2**22 + 16, 2**24])
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 12, 24, 48, 96])
def test_partial_sums_of_many_rows_fit_into_the_registers_of_one_program(channels: int, rows: int) -> None:
    """Several rows in one leave as many sums a program: with one channel there were 32768, four times what fits."""
    tiles, fold = folded_tiles(rows * channels, channels, 1024, sums=True)
    parts = tiles.programs * fold
    assert columns_for(parts) * 2 ** (parts - 1).bit_length() <= 2**13
    assert math.prod(tiles.grid) >= 256 and fold > 1


def test_on_a_cpu_it_is_torch_s_own() -> None:
    case = Case((4, 24, 8, 8))
    x = case.x(torch.float32, "cpu")
    assert not kernels.takes(x, 0.1)
    wanted, found = case.run(ops.batch_norm, x), case.run(kernels.batch_norm, x)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
