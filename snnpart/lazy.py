"""A program that is compiled when its first batch comes, as with `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from snnpart.errors import LaunchError

if TYPE_CHECKING:
    from snnpart.api import ParallelProgram


class LazyProgram:
    """A launched program that waits for its first batch; afterwards it is the running program."""

    def __init__(self, program: ParallelProgram, options: Mapping[str, Any]) -> None:
        self._program, self._options = program, options
        self._running: Any = None

    def train_step(self, inputs: Any, targets: Any, loss_fn: Callable[..., Tensor], **options: Any) -> Tensor:
        """Compile and launch at the first call; then `RunningProgram.train_step`."""
        loss: Tensor = self._start(inputs).train_step(inputs, targets, loss_fn, **options)
        return loss

    def eval_step(self, inputs: Any, targets: Any = None, loss_fn: Any = None, **options: Any) -> Any:
        """Compile and launch at the first call; then `RunningProgram.eval_step`."""
        return self._start(inputs).eval_step(inputs, targets, loss_fn, **options)

    def _start(self, inputs: Any) -> Any:
        if self._running is None:
            self._program.compile(inputs)
            self._running = self._program._launch(self._options)
        return self._running

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._running is None:
            raise LaunchError(
                f"{name} is not there before the first batch: the program is compiled when it comes",
                fix="give example_inputs= to parallelize to have it at once",
            )
        return getattr(self._running, name)
