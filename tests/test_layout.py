"""Layouts say where batch and time are; what does not fit is refused."""

import pytest
import torch

from snnpart.errors import ConfigError
from snnpart.layout import input_dims


def test_a_layout_names_batch_and_time():
    dims = input_dims(torch.zeros(4, 2, 3, 8, 8), layout="TNCHW")
    assert (dims.batch, dims.time) == ((1,), (0,))
    dims = input_dims((torch.zeros(2, 4, 3), torch.zeros(2, 5)), layout=("NTF", "NF"))
    assert (dims.batch, dims.time) == ((0, 0), (1, None))


def test_without_a_layout_the_batch_is_dim_0_and_time_is_absent_whatever_the_number_of_dims():
    dims = input_dims({"a": torch.zeros(4, 2, 3, 8, 8), "b": torch.tensor(1.0)})
    assert (dims.batch, dims.time) == ((0, None), (None, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "CHW"}, "must hold N"),
        ({"layout": "NNC"}, "must hold N"),
        ({"layout": "NCHW"}, "names 4 dims, the input has 3"),
        ({"layout": ("NCH", "NCH")}, "2 entries for 1"),
        ({"layout": "NCH", "in_dims": 0}, "twice"),
        ({"in_dims": 3}, "outside the 3 dims"),
        ({"time_dims": -4}, "outside the 3 dims"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        input_dims(torch.zeros(2, 3, 4), **options)
