"""Models without numbers: on the meta device, or with lazy layers that wait for their first input.

A meta model is traced, decided and lowered as any other; what needs numbers (the comparison with the model) is left
out. Its values come at launch, slice by slice (`runtime.values`).

Lazy layers take their shapes from a first forward, which is run here as the user's own first call would: parameters
are drawn then, BatchNorm's averages and the neurons' state stay as they were. Lazy layers on the meta device get their
shapes on it, so that no rank ever holds the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from snnpart.compat import BatchNormBase, InstanceNormBase
from snnpart.errors import TraceError
from snnpart.frameworks import reset_state

NOT_COMPARED = (
    "the network is on the meta device, without numbers: nothing was compared with it; compile a small copy of it on "
    "the CPU to have the comparison"
)


def is_blank(model: nn.Module) -> bool:
    """Whether a tensor of the model is on the meta device."""
    return any(x.is_meta for x in (*model.parameters(), *model.buffers()))


def settle_lazy(model: nn.Module, inputs: Any, reset: Callable[[nn.Module], Any] | None = None) -> None:
    """Give lazy layers their shapes (and values, off the meta device) by one forward on `inputs`, one step of them.

    Raises:
        TraceError: the forward fails, or leaves a layer without a shape.
    """
    waiting = [path for path, module in model.named_modules() if _waits(module)]
    if not waiting:
        return
    on_meta = all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    given = pytree.tree_map(lambda x: x.to("meta") if on_meta and isinstance(x, Tensor) else x, inputs)
    with _averages_kept(model), torch.no_grad():
        try:
            _call(model, given)
        except Exception as error:
            raise TraceError(
                f"the first forward, which gives lazy layers their shapes, failed: {type(error).__name__}: {error}",
                where=f"lazy layers {waiting[:5]}",
                fix="run the model once on an example input before",
            ) from error
    reset_state(model, reset)
    left = [path for path, module in model.named_modules() if _waits(module)]
    if left:
        raise TraceError(
            f"lazy layers {left[:5]} have no shape: forward did not reach them",
            fix="run the model once so that it does, or give their sizes",
        )


def _waits(module: nn.Module) -> bool:
    return any(is_lazy(x) for x in (*module._parameters.values(), *module._buffers.values()) if x is not None)


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        model(**inputs)
    elif type(inputs) is tuple:
        model(*inputs)
    else:
        model(inputs)


@contextmanager
def _averages_kept(model: nn.Module) -> Iterator[None]:
    """Put back what the forward does to running statistics; those that it makes start anew."""
    lazy = [module for module in model.modules() if _waits(module)]
    kept = [(b, b.detach().clone()) for module in model.modules() if module not in lazy for b in module.buffers(False)]
    yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value) if buffer.shape == value.shape else None
    for module in lazy:
        if isinstance(module, (BatchNormBase, InstanceNormBase)):
            module.reset_running_stats()
