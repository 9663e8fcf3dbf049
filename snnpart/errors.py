"""Errors: where it happened, which rule was broken, and how to mend it.

Every error a user can meet derives from `SnnpartError`. The message has at most four parts, in this order:
the place (node, module path, the user's line), what is wrong with the values in their units, what to change,
and the valid choices. A message is part of the behaviour and is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SnnpartError(Exception):
    """Base of every error that snnpart raises on purpose.

    Args:
        what: the rule that was broken, with the values that broke it.
        where: the place: a node, a module path, a source line, a rank.
        fix: what to change.
        choices: the valid values, if there are few.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", choices: Iterable[Any] = ()) -> None:
        self.what, self.where, self.fix, self.choices = what, where, fix, tuple(choices)
        super().__init__(what)

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.fix:
            parts.append(f"  to mend it: {self.fix}")
        if self.choices:
            parts.append("  valid: " + ", ".join(str(choice) for choice in self.choices))
        return "\n".join(parts)


class ConfigError(SnnpartError, ValueError):
    """An argument or a configuration field has a value that cannot be meant."""


class TraceError(SnnpartError):
    """The user's module does something that no graph can hold."""


class PlanError(SnnpartError):
    """No plan satisfies the request, or a plan does not fit the graph."""


class VerifyError(SnnpartError):
    """Two programs that must compute the same do not, or a graph breaks a rule of the IR."""


class LaunchError(SnnpartError, RuntimeError):
    """The program cannot start, or cannot go on, on these ranks."""


class CheckpointError(SnnpartError):
    """A saved program or checkpoint is incomplete, damaged or of another kind."""
