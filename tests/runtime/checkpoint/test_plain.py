"""Small state goes through JSON and comes back as it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snnpart.errors import CheckpointError
from snnpart.runtime.checkpoint.plain import decode, encode

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.sampled_from(["__tuple__", "__tensor__", "__pairs__", "__bytes__"]), inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_round_trip(value: object) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_tensors_and_counters() -> None:
    rate = torch.tensor([0.1, 0.2], dtype=torch.float64)
    back = decode(json.loads(json.dumps(encode({"rate": rate, "milestones": Counter({30: 1})}))))
    assert torch.equal(back["rate"], rate) and back["rate"].dtype == torch.float64
    assert back["milestones"] == {30: 1}
    assert encode(Path("a/b")) == "a/b"


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"extra\.scheduler\.fn\[0\] is a function"):
        encode({"scheduler": {"fn": [lambda x: x]}})
