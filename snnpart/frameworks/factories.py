"""Models made from the command line: arguments that a framework's factory needs, and the step mode of a layout.

A framework's own model zoo leaves the neuron class to the caller; on the command line it gets the framework's usual
one. Only modules made here are put into a step mode: a user's module is never changed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from snnpart.frameworks.registry import adapters

_USUAL = {"spikingjelly": {"spiking_neuron": "spikingjelly.activation_based.neuron:LIFNode"}}
"""Package of a factory -> arguments that it leaves open, and the usual choice."""


def prepare_factory(factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the usual neuron class added where the factory asks for one and the caller did not say."""
    usual = _USUAL.get(getattr(factory, "__module__", "").partition(".")[0], {})
    try:
        asked = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return dict(given)
    found = {name: _load(path) for name, path in usual.items() if name in asked and name not in given}
    return {**found, **given}


def set_step_mode(model: nn.Module, multi_step: bool) -> None:
    """Put every module that knows step modes into multi-step (all T in one call) or single-step mode."""
    for adapter in adapters():
        for module in model.modules():
            adapter.for_layout(module, multi_step)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
