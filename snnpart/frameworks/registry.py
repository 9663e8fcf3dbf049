"""Which adapter knows a module.

An adapter is asked only when its framework is already imported: a model made with a framework has imported it, so
snnpart never imports a framework itself. Classes are remembered once they are known; the answer depends on the class
alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.frameworks.adapter import Adapter
from snnpart.frameworks.torch_opaque import TorchAdapter

# Import name of a framework -> class of its adapter, in the file of that name, which imports the framework.
_ADAPTERS = {
    "spikingjelly": "SpikingJellyAdapter",
    "snntorch": "SnnTorchAdapter",
    "norse": "NorseAdapter",
    "sinabs": "SinabsAdapter",
}
_DEFAULT = TorchAdapter()


@cache
def _load(package: str) -> Adapter:
    module = importlib.import_module(f"{__package__}.{package}")
    made: Adapter = getattr(module, _ADAPTERS[package])()
    return made


def adapters() -> tuple[Adapter, ...]:
    """The adapters of the frameworks that are imported now."""
    return tuple(_load(package) for package in _ADAPTERS if package in sys.modules)


def adapter_for(module: nn.Module) -> Adapter:
    """The adapter that knows the module's class; torch's own when no framework does."""
    roots = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    for package in _ADAPTERS:
        if package in roots and (adapter := _load(package)).knows(module):
            return adapter
    return _DEFAULT


def is_leaf(module: nn.Module) -> bool:
    """Whether the module stays whole in the graph."""
    return adapter_for(module).is_leaf(module)


def hook_by_element(hook: Callable[[Tensor], Any]) -> bool:
    """Whether a framework that is imported knows the gradient hook to treat every element by itself."""
    return any(adapter.hook_by_element(hook) for adapter in adapters())


def fit(leaf: nn.Module, original: nn.Module, size: int, example: int) -> None:
    """Make a leaf's copy ready for a call that was traced with `original`: its step mode and its batch size.

    Graphs of one network for several numbers of steps share the copy, and may have the layer in different step modes.
    `size` samples come where `original` was traced with `example`.
    """
    copies = dict(leaf.named_modules())  # a copy may hold more modules: those its unregistered tensors hang on
    for path, source in original.named_modules():
        adapter = adapter_for(source)
        adapter.for_layout(copies[path], multi_step=adapter.time_dim(source) is not None)
        adapter.set_batch(copies[path], source, size, example)


def tell_batch(model: nn.Module, size: int, example: int) -> None:
    """Tell every layer of `model` that has a batch size written in that `size` samples come instead of `example`.

    One whose size would be no whole number keeps what it has: the batch dim counts something else than samples.
    """
    for module in model.modules():
        with suppress(ConfigError):
            adapter_for(module).set_batch(module, module, size, example)


def packages() -> tuple[str, ...]:
    """The import names of all frameworks that have an adapter."""
    return tuple(_ADAPTERS)
