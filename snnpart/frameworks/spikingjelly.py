"""SpikingJelly: neurons and other modules that keep state in registered memories.

Leaves are its neurons and every `MemoryModule` without a stateful or trainable child (synapse filters, the user's own).
Containers, convolutions, norms and dropout are traced through: the mask that a dropout keeps over time is then a value
like any other, and is dealt out over tp ranks as one process draws it. Versions differ in what exists, so classes are
looked up by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from spikingjelly.activation_based import base, neuron
from spikingjelly.activation_based import layer as layers
from torch import Tensor, nn

from snnpart.facts import Domain
from snnpart.frameworks.adapter import REAL, SPIKE, Adapter, defined_in, empty, needs_grad

_NEURONS = ("spikingjelly.activation_based.neuron", "spikingjelly.activation_based.auto_cuda.neuron")

# Neurons whose every element depends on that element's own inputs alone, with the operations of one step.
_FLOPS = {
    "IFNode": 5.0,
    "SimpleIFNode": 5.0,
    "HalfThresholdIFNode": 5.0,
    "LIFNode": 8.0,
    "SimpleLIFNode": 8.0,
    "ILIFNode": 8.0,
    "ParametricLIFNode": 9.0,
    "QIFNode": 10.0,
    "EIFNode": 12.0,
    "IzhikevichNode": 14.0,
    "LIAFNode": 8.0,
    "KLIFNode": 9.0,
    "ComplementaryLIFNode": 14.0,
    "CUBALIFNode": 11.0,
    "TernaryIFNode": 7.0,
    "TernaryLIFNode": 10.0,
    "PSN": 8.0,
    "MaskedPSN": 8.0,
    "SlidingPSN": 8.0,
}
_DROPOUTS = ("Dropout", "Dropout2d")
_TERNARY = ("TernaryIFNode", "TernaryLIFNode")
_NOT_BINARY = ("LIAFNode", "ILIFNode", *_TERNARY)


def _ours(module: nn.Module, names: Any) -> bool:
    """Whether the module is exactly one of the framework's classes of these names, not a subclass of the user's."""
    kind = type(module)
    name = kind.__name__
    return name in names and kind in (getattr(neuron, name, None), getattr(layers, name, None))


class SpikingJellyAdapter(Adapter):
    """SpikingJelly 0.0.0.0.14 to 2.0.0."""

    name = "spikingjelly"
    package = "spikingjelly"

    def is_neuron(self, module: nn.Module) -> bool:
        return isinstance(module, neuron.BaseNode) or defined_in(module, *_NEURONS)

    def is_leaf(self, module: nn.Module) -> bool:
        if self.is_neuron(module):
            return True
        if _ours(module, _DROPOUTS):
            return False
        children = [child for child in module.modules() if child is not module]
        return isinstance(module, base.MemoryModule) and not any(
            isinstance(child, base.MemoryModule) or next(child.parameters(), None) is not None for child in children
        )

    def reset(self, module: nn.Module) -> None:
        if not isinstance(module, base.MemoryModule):
            if self.is_neuron(module):
                vars(module).pop("v", None)
            return
        # reset() writes into memories in place; a fresh start value first keeps the user's tensor as it is
        vars(module).setdefault("_memories", {})
        for name, start in module._memories_rv.items():
            module._memories[name] = copy.deepcopy(start)
        module.reset()

    def transient_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset({"_memories", "v_seq"}) if isinstance(module, base.MemoryModule) else frozenset({"v"})

    def infer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not _ours(module, _FLOPS) or len(args) != 1 or kwargs or getattr(module, "_neuron_precision", None):
            return NotImplemented
        (x,) = args
        assert isinstance(x, Tensor)
        shape = tuple(x.shape) if self.time_dim(module) == 0 else None
        return empty(x, shape, grad=needs_grad(module, x))

    def state_names(self, module: nn.Module) -> frozenset[str]:
        return (
            frozenset({"_memories", *module._memories}) if isinstance(module, base.MemoryModule) else frozenset({"v"})
        )

    def time_dim(self, module: nn.Module) -> int | None:
        mode = getattr(module, "step_mode", "m" if isinstance(module, base.MultiStepModule) else "s")
        if isinstance(module, base.MultiStepModule) or mode == "m":
            return 0
        return None

    def is_elementwise(self, module: nn.Module) -> bool:
        return _ours(module, _FLOPS)

    def channel_dim(self, module: nn.Module, ndim: int) -> int | None:
        dim = 1 if self.time_dim(module) is None else 2
        return dim if self.is_elementwise(module) and ndim > dim else None

    def channel_tensors(self, module: nn.Module) -> dict[str, int] | None:
        return {} if self.is_elementwise(module) else None

    def output_domain(self, module: nn.Module) -> Domain:
        surrogate = getattr(module, "surrogate_function", None)
        if not self.is_elementwise(module) or not getattr(surrogate, "spiking", False):
            return REAL
        if _ours(module, _TERNARY):
            return Domain("ternary", -1.0, 1.0)
        return REAL if _ours(module, _NOT_BINARY) else SPIKE

    def flops_per_element(self, module: nn.Module) -> float:
        return _FLOPS.get(type(module).__name__, 8.0 if self.is_neuron(module) else 1.0)

    def one_step(self, module: nn.Module) -> bool:
        if not isinstance(module, getattr(neuron, "NonSpikingBaseNode", ())):
            return super().one_step(module)
        module.forward = partial(_one_charge, module)  # type: ignore[method-assign]
        return module.decode is None

    def for_layout(self, module: nn.Module, multi_step: bool) -> None:
        mode = "m" if multi_step else "s"
        if isinstance(module, base.StepModule) and mode in module.supported_step_mode():
            module.step_mode = mode


def _one_charge(layer: Any, x: Tensor) -> Tensor:
    """One step of a neuron that does not spike, which sets its membrane to zero before all of them."""
    if "v" not in vars(layer):
        layer.v = torch.zeros_like(x)
    layer.neuronal_charge(x)
    return layer.v  # type: ignore[no-any-return]
