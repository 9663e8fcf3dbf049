"""Bits are unpacked where they belong and nowhere else, in Triton's interpreter and by the reference."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.planes import CASES, Gathered
from tests.runtime.kernels.test_fused_neuron import lines_of
from tests.runtime.kernels.test_fused_neuron import pytestmark as in_the_interpreter


@in_the_interpreter
def test_pieces_of_uneven_size_are_put_side_by_side() -> None:
    """Their planes are as long as the largest piece's: what is behind a piece is no part of it."""
    found = lines_of("", "planes")
    assert len(found) == len(CASES)
    assert [line for line in found if line["wrong"]] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_puts_them_there_too(case: Gathered) -> None:
    assert case.wrong(torch.float64, "cpu") == []
