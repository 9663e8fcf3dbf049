"""`self.training` while tracing.

A module's forward that passes `self.training` on (`F.dropout(x, 0.5, self.training)`) gets a graph that holds for both
modes: the argument becomes the node `training`. One that asks for its truth (`if self.training:`) is answered with the
mode being traced, and the graph holds for that mode only.
"""

from __future__ import annotations

from collections.abc import Callable


class TrainingFlag:
    """Stands for `module.training`; taking its truth calls `asked` and answers with `value`."""

    __slots__ = ("_asked", "value")

    def __init__(self, value: bool, asked: Callable[[], None]) -> None:
        self.value, self._asked = value, asked

    def __bool__(self) -> bool:
        self._asked()
        return self.value

    def __int__(self) -> int:
        return int(bool(self))

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(self.value)
