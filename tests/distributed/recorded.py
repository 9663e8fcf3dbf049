"""A stand-in for CUDA graphs on the CPU: a replay carries out anew what would have been recorded.

So tests without a GPU see which passes the ranks capture, that they replay them, and what they do when one cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from snnpart import compat
from snnpart.runtime.captures import WARM, Captures, StaticPass
from snnpart.runtime.static_step import StaticStep


class Recorded:
    """In the place of a graph."""

    def __init__(self, one: StaticPass) -> None:
        self._one, self.replays = one, 0

    def replay(self) -> None:
        self.replays += 1
        self._one._result = self._one._body()
        if isinstance(self._one, StaticStep):
            self._one._grads = [(parameter, parameter.grad) for parameter in self._one._engine.parameters()]


@contextmanager
def recording(fails: int | None = None) -> Iterator[None]:
    """A block in which passes are captured once they ran often enough; on rank `fails` no capture works."""
    agree = Captures.capture

    def capture(one: Any, stream: Any, pool: Any) -> None:
        if one._engine.ranks.rank == fails:
            one._engine.begin_sums()
            for parameter in one._engine.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            raise RuntimeError("this operation waits for the device")
        one._graph = Recorded(one)

    def together(captures: Any, one: StaticPass) -> bool:
        captures.stream = "a stream"
        try:
            return agree(captures, one)
        finally:
            captures.stream = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticPass, "capture", capture)
        patch.setattr(Captures, "capture", together)
        patch.setattr(Captures, "may_capture", lambda captures, one: not captures._failed and one.runs >= WARM)
        patch.setattr(compat, "end_failed_capture", lambda *_: None)
        yield
