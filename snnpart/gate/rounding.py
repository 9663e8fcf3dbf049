"""Comparisons are made in whole float32. With TensorFloat-32, torch's default for convolutions on GPUs, a product keeps
ten bits: two right programs that choose other algorithms then differ by more than a comparison allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import backends

_cudnn: Any = backends.cudnn  # a module that makes its attributes itself
_SWITCHES: tuple[Any, ...] = (_cudnn.conv, _cudnn.rnn, backends.cuda.matmul)


@contextmanager
def whole_float32() -> Iterator[None]:
    """Products of float32 numbers in float32; afterwards as the user has it."""
    before = [switch.fp32_precision for switch in _SWITCHES]
    try:
        for switch in _SWITCHES:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(_SWITCHES, before, strict=True):
            switch.fp32_precision = precision
