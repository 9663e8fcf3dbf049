"""Norse: cells and time-looping modules whose state is an argument and a result, a NamedTuple or None.

Layers that hold matrices (recurrent ones, `LILinearCell`) are leaves too, unless tp ranks are to share these: then they
are traced through.

Nothing is kept on the module. Which NamedTuple a call returns is found by running the module on one real sample of
zeros: the shapes follow from it, because neurons never mix samples or steps. Parameters `p` are tensors in a
NamedTuple on the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from norse.torch.module import snn
from norse.torch.module.coba_lif import CobaLIFCell
from norse.torch.module.leaky_integrator import LILinearCell
from torch import Tensor, nn

from snnpart import compat
from snnpart.facts import Domain
from snnpart.frameworks.adapter import REAL, SPIKE, Adapter, empty, tensors_in

_LOOPS = (snn.SNN, snn.SNNRecurrent)
_WITH_MATRIX = (snn.SNNRecurrentCell, snn.SNNRecurrent, LILinearCell)
_NEURONS = (snn.SNNCell, snn.SNNRecurrentCell, LILinearCell, CobaLIFCell, *_LOOPS)

_HELD = "_held_state"
"""Where a loop keeps its state that was made to take one step."""


class NorseAdapter(Adapter):
    """Norse 1.0 to 1.1."""

    name = "norse"
    package = "norse"

    def holds_matrix(self, module: nn.Module) -> bool:
        return isinstance(module, _WITH_MATRIX)

    def is_neuron(self, module: nn.Module) -> bool:
        return isinstance(module, _NEURONS)

    def infer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self.is_neuron(module):
            return NotImplemented
        x: Tensor = args[0] if args else kwargs["input_tensor"]
        lead = 2 if isinstance(module, _LOOPS) else 1
        probe = (1,) * lead + tuple(x.shape[lead:])
        flags = [(p, p.requires_grad) for p in tensors_in(getattr(module, "p", ()))]
        with compat.real_tensors(), torch.enable_grad():
            sample = torch.zeros(probe, dtype=x.dtype, requires_grad=x.requires_grad)
            result = module.forward(sample)
        for parameter, flag in flags:
            # IAF's first state is `p.v_reset` itself, which it makes require a gradient
            parameter.requires_grad_(flag)
        return _grow(result, result[0].shape, x, lead)

    def time_dim(self, module: nn.Module) -> int | None:
        return 0 if isinstance(module, _LOOPS) else None

    def one_step(self, module: nn.Module) -> bool:
        layer: Any = module
        layer.record_states, layer.forward = False, partial(_one_step, layer)
        return True

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, _LOOPS):
            vars(module).pop(_HELD, None)

    def state_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset({_HELD} & vars(module).keys())

    def is_elementwise(self, module: nn.Module) -> bool:
        parameters = tensors_in(getattr(module, "p", ()))
        return isinstance(module, (snn.SNNCell, snn.SNN)) and all(p.dim() == 0 for p in parameters)

    def channel_dim(self, module: nn.Module, ndim: int) -> int | None:
        dim = 2 if isinstance(module, _LOOPS) else 1
        return dim if self.is_elementwise(module) and ndim > dim else None

    def channel_tensors(self, module: nn.Module) -> dict[str, int] | None:
        return {} if self.is_elementwise(module) else None

    def hook_by_element(self, hook: Callable[[Tensor], Any]) -> bool:
        """The hook that keeps neurons from exciting themselves: it clears the diagonal of the gradient."""
        return hook.__module__ == snn.__name__ and getattr(hook, "__qualname__", "").endswith(".autapse_hook")

    def output_domain(self, module: nn.Module) -> Domain:
        name = type(module).__name__
        integrator = name.startswith("LI") and not name.startswith("LIF")
        return SPIKE if self.is_neuron(module) and not integrator else REAL

    def flops_per_element(self, module: nn.Module) -> float:
        return 12.0


def _one_step(layer: nn.Module, x: Tensor) -> Tensor:
    made, state = type(layer).forward(layer, x.unsqueeze(0), vars(layer).get(_HELD))
    vars(layer)[_HELD] = state
    return made.squeeze(0)  # type: ignore[no-any-return]


def _grow(value: Any, probed: torch.Size, x: Tensor, lead: int) -> Any:
    """The result for one sample and step, with the sizes of the whole input."""
    if isinstance(value, Tensor):
        grad = torch.is_grad_enabled() and value.requires_grad
        if value.shape == probed:
            return empty(x, (*x.shape[:lead], *probed[lead:]), dtype=value.dtype, grad=grad)
        if lead == 2 and value.shape == probed[1:]:
            return empty(x, (*x.shape[1:lead], *probed[lead:]), dtype=value.dtype, grad=grad)
        return empty(x, tuple(value.shape), dtype=value.dtype, grad=grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_grow(item, probed, x, lead) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_grow(item, probed, x, lead) for item in value)
    return value
