"""Seconds in which this rank waits for others on the host, counted while a profile asks for them.

Over gloo a receive holds the thread up until its message is there: this is the pipeline's waiting. Over NCCL it holds
the stream up instead: kernels say then how long (`profiling`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_asked: list[list[float]] = []


@contextmanager
def counted() -> Iterator[list[float]]:
    """The waits inside, one number each, growing as they end."""
    found: list[float] = []
    _asked.append(found)
    try:
        yield found
    finally:
        _asked.remove(found)


@contextmanager
def waiting() -> Iterator[None]:
    """What is done inside is a wait."""
    began = time.perf_counter()
    try:
        yield
    finally:
        for found in _asked:
            found.append(time.perf_counter() - began)
