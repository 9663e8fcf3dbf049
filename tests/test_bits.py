"""Values with few states as bits: layout, width, and the choice by cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snnpart import bits
from snnpart.costs import CPU, H200, Link
from snnpart.facts import Domain, Value
from snnpart.runtime.kernels import bits as kernels

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("states, width", [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (9, 4), (256, 8)])
def test_width_is_the_logarithm_of_the_states(states: int, width: int) -> None:
    assert bits.width(states) == width
    assert bits.packed_bytes(80, states) == 10 * width


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    low=st.integers(-3, 2),
    states=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
)
def test_what_is_packed_comes_back(shape: list[int], low: int, states: int, dtype: torch.dtype) -> None:
    x = torch.randint(low, low + states, shape).to(dtype)
    planes = kernels.pack(x, (low, states))
    assert planes.shape == (bits.width(states), -(-x.numel() // 8)) and planes.dtype is torch.uint8
    back = kernels.unpack(planes, x.numel(), (low, states), dtype)
    assert back.dtype is dtype and torch.equal(back.reshape(shape), x)


def test_spikes_lie_bit_by_bit() -> None:
    x = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 1])
    assert bits.pack(x, (0, 2)).tolist() == [[1 + 8 + 128, 1]]
    assert bits.pack(torch.tensor([-1.0, 0, 1]), (-1, 3)).tolist() == [[2], [4]]
    flags = torch.tensor([True, False, True])
    assert torch.equal(bits.unpack(bits.pack(flags, (0, 2)), 3, (0, 2), torch.bool), flags)


@pytest.mark.parametrize(
    "domain, dtype, states",
    [
        (Domain("spike", 0, 1), torch.float32, (0, 2)),
        (Domain("ternary", -1, 1), torch.bfloat16, (-1, 3)),
        (Domain("integer", 0, 5), torch.float64, (0, 6)),
        (Domain("integer", 0, 300), torch.float32, None),
        (Domain("integer", 0, float("inf")), torch.float32, None),
        (Domain("integer", 0, 255), torch.uint8, None),
        (Domain("real", 0, 1), torch.float32, None),
        (None, torch.float32, None),
    ],
)
def test_only_few_whole_numbers_are_packed(
    domain: Domain | None, dtype: torch.dtype, states: tuple[int, int] | None
) -> None:
    assert bits.states_of(domain, dtype) == states


def test_the_cost_model_decides() -> None:
    """Over a slow link bits win; over NVLink the two kernels cost more than a small message."""
    spikes = Domain("spike", 0, 1)
    small, large = (Value((n,), torch.float32, (0,)) for n in (64, 1 << 24))
    slow = replace(CPU, links={"tp": Link(1e8, 10.0)})
    assert bits.gather_us(slow, "tp", large, spikes, 2)[1] == (0, 2)
    assert bits.gather_us(H200, "tp", small, spikes, 2)[1] is None
    for value in (small, large):
        us, states = bits.gather_us(H200, "tp", value, spikes, 2)
        assert us <= H200.all_gather_us("tp", value.bytes, 2) and (states is None) == (
            us == H200.all_gather_us("tp", value.bytes, 2)
        )
