"""execution="compile": torch.compile between what must stay as it is.

Neuron layers, loops, fused neurons, surrogates and collectives are called as they are: they keep state, hold process
groups, or are kernels already. What lies between them is compiled. A piece that torch cannot compile runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from snnpart import ops
from snnpart.ops_later import itself
from snnpart.ops_layout import LAYOUT_OPS

_TRACEABLE = frozenset(
    {itself, ops.batch_norm, ops.batch_norm_copies, ops.affine, ops.index_assign, ops.select_pieces, *LAYOUT_OPS}
)


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a stage graph, compiled piece by piece."""
    import torch._dynamo as dynamo  # takes seconds, which the other modes need not wait for

    made = torch.compile(run)

    def call(*args: Any) -> Any:
        with dynamo.config.patch(suppress_errors=True):
            return made(*args)

    return call


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
