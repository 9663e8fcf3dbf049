"""What an optimizer's step takes as fixed while it is captured, and whether it stays so.

The learning rate is not among it. A change makes another kind of step, which is captured anew; of a hyperparameter that
had more than `KEPT` values no step would come often enough.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

KEPT = 2
"""Values of one hyperparameter for which steps are captured."""


class Hyperparameters:
    """Those of one rank's optimizer (None: none)."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, notice: Callable[[str], None]) -> None:
        self._optimizer, self._notice = optimizer, notice
        self._seen: dict[str, set[Hashable]] = {}
        self.now: tuple[Hashable, ...] = ()
        """All of them, as they were at the last look."""
        self.cycle = False
        """Whether one of them had more than `KEPT` values."""

    def look(self) -> None:
        """Take them as they are now; one that changes too often is named once."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        names = list(dict.fromkeys(name for group in groups for name in group if name not in ("params", "lr")))
        values = {name: tuple(_frozen(group.get(name)) for group in groups) for name in names}
        self.now = (tuple(values.items()), *(len(group["params"]) for group in groups))
        for name, value in values.items():
            self._seen.setdefault(name, set()).add(value)
            if len(self._seen[name]) > KEPT and not self.cycle:
                self.cycle = True
                self._say(name)

    def _say(self, name: str) -> None:
        fix = "cycle_momentum=False in the scheduler" if name in ("betas", "momentum") else "leave it as it is"
        self._notice(
            f"'{name}' of {type(self._optimizer).__name__} changes from step to step: the optimizer's step runs after "
            f"the captured part of each train step from now on; {fix} to have it captured too"
        )


def _frozen(value: Any) -> Hashable:
    """Equal for equal values, of which some cannot be hashed; a tensor on the device is read there by each step."""
    if isinstance(value, Tensor):
        return id(value) if value.is_cuda else repr(value.tolist())
    if isinstance(value, list | tuple):
        return tuple(_frozen(x) for x in value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
