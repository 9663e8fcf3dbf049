"""execution="compile": torch.compile between what must stay as it is.

Neuron layers, loops, fused neurons, surrogates and collectives are called as they are: they keep state, hold process
groups, or are kernels already. What lies between them is compiled. A piece that torch cannot compile runs eagerly, of
which a notice is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from snnpart import ops
from snnpart.ops_later import itself
from snnpart.ops_layout import LAYOUT_OPS

_TRACEABLE = frozenset(
    {itself, ops.batch_norm, ops.batch_norm_copies, ops.affine, ops.index_assign, ops.select_pieces, *LAYOUT_OPS}
)


def compiled(run: Callable[..., Any], uncompiled: Callable[[str], None] | None) -> Callable[..., Any]:
    """The function of a graph, compiled piece by piece; `uncompiled` is told why a piece is not."""
    import torch._dynamo as dynamo  # takes seconds, which the other modes need not wait for

    made, ear = torch.compile(run), _Ear(uncompiled)

    def call(*args: Any) -> Any:
        with dynamo.config.patch(suppress_errors=True), ear.open():
            return made(*args)

    return call


class _Ear(logging.Handler):
    """Hears which pieces run eagerly: torch says it in its log and nowhere else."""

    def __init__(self, uncompiled: Callable[[str], None] | None) -> None:
        super().__init__(logging.WARNING)
        self._uncompiled = uncompiled or (lambda why: None)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            cause = getattr(error, "inner_exception", error)  # torch's own wraps the compiler's
            self._uncompiled(f"{type(cause).__name__}: {cause}".splitlines()[0])
        elif "hit config" in str(record.msg):  # more kinds of inputs than it compiles for
            self._uncompiled(record.getMessage().partition("\n")[0])

    @contextmanager
    def open(self) -> Iterator[None]:
        """A block in which it hears."""
        log = logging.getLogger("torch._dynamo.convert_frame")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)


def left_alone(target: Any) -> Any:
    """A node's target as the compiler may see it: ours are called, not looked into."""
    ours = isinstance(target, ops.Surrogate) or getattr(target, "__module__", "").startswith("snnpart")
    if not ours or not callable(target) or _is_traceable(target):
        return target
    return torch.compiler.disable(lambda *args, **kwargs: target(*args, **kwargs))


def _is_traceable(target: Any) -> bool:
    try:
        return target in _TRACEABLE
    except TypeError:  # not hashable
        return False


def leave_alone(leaf: nn.Module) -> None:
    """Have a neuron layer, a copy of ours, called as it is."""
    leaf.forward = torch.compiler.disable(leaf.forward)  # type: ignore[method-assign]
