"""snnTorch: its neurons are leaves; their state comes in and goes out as arguments, or stays hidden in buffers.

Recurrent neurons with a matrix, and LSTM cells, are traced through: the matrix is then an operation of the graph, whose
rows tp ranks can share.

A call returns `(spk, *states)`, or `spk` alone with `init_hidden=True` and no `output=True`. Spikes have the dtype that
the surrogate gives, which is float32 for snnTorch's own whatever goes in, so it is asked on one element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from snntorch import _neurons as neurons
from torch import Tensor, nn

from snnpart.facts import Domain
from snnpart.frameworks.adapter import REAL, SPIKE, Adapter, defined_in, empty, needs_grad, tensors_in

# Neuron class -> how many state tensors follow the spikes in its output, and the operations of one element's step.
_ELEMENTWISE = {"Leaky": (1, 8.0), "Lapicque": (1, 10.0), "Synaptic": (2, 11.0), "Alpha": (3, 24.0)}
_RECURRENT = {"RLeaky": (1, 8.0), "RSynaptic": (2, 11.0)}
_LSTM = {"SLSTM": (2, 30.0), "SConv2dLSTM": (2, 30.0)}
_STEP = {**_ELEMENTWISE, **_RECURRENT, **_LSTM}
_STATE = frozenset({"mem", "syn", "syn_exc", "syn_inh", "spk"})
_MULTI_STEP = ("LeakyParallel", "StateLeaky", "AssociativeLeaky")


def _ours(module: nn.Module, names: Any) -> bool:
    kind = type(module)
    return kind.__name__ in names and kind is getattr(neurons, kind.__name__, None)


class SnnTorchAdapter(Adapter):
    """snnTorch 0.9 to 1.0."""

    name = "snntorch"
    package = "snntorch"

    def is_leaf(self, module: nn.Module) -> bool:
        return self.is_neuron(module) and (not _has_matrix(module) or bool(module.state_quant))

    def is_neuron(self, module: nn.Module) -> bool:
        return defined_in(module, "snntorch._neurons") and type(module).__name__ != "RecurrentOneToOne"

    def reset(self, module: nn.Module) -> None:
        if not self.is_neuron(module):
            return
        if callable(reset := getattr(module, "reset_mem", None)):
            reset()
        # as new: reset_mem() keeps the batch size of the last call, which would be written into the graph
        for name, state in module._buffers.items():
            if name in _STATE and state is not None:
                module._buffers[name] = torch.zeros(0, dtype=state.dtype, device=state.device)
        for name in ("reset", "spk"):
            vars(module).pop(name, None)

    @contextmanager
    def confined(self, model: nn.Module) -> Iterator[None]:
        """`utils.reset` inside forward resets every neuron of the process, which snnTorch lists on a class."""
        instances: list[Any] = neurons.SpikingNeuron.instances
        every = list(instances)
        instances[:] = [module for module in model.modules() if self.is_neuron(module)]
        try:
            yield
        finally:
            instances[:] = every

    def transient_names(self, module: nn.Module) -> frozenset[str]:
        return _STATE | {"reset"} if self.is_neuron(module) else frozenset()

    def infer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not _ours(module, _STEP) or module.state_quant:
            return NotImplemented
        x = args[0] if args else kwargs["input_"]
        dtype = reduce(torch.promote_types, [t.dtype for t in tensors_in((args, dict(kwargs))) if t.dim()], x.dtype)
        spikes = _spike_dtype(module, dtype, x.device)
        # the membrane is lowered by the reset signal, which is a spike
        dtype = torch.promote_types(dtype, spikes)
        grad = needs_grad(module, args, dict(kwargs))
        first = empty(x, dtype=spikes, grad=grad and not module.surrogate_disable)
        if module.init_hidden and not module.output:
            return first
        count = _STEP[type(module).__name__][0]
        return (first, *(empty(x, dtype=dtype, grad=grad) for _ in range(count)))

    def state_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset({"spk", *module._non_persistent_buffers_set}) if self.is_neuron(module) else frozenset()

    def takes_all_state(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """A state that is None or left out is the one that the module kept."""
        given = sum(item is not None for item in (*args[1:], *kwargs.values()))
        return given >= _state_arguments(module)

    def time_dim(self, module: nn.Module) -> int | None:
        return 0 if type(module).__name__ in _MULTI_STEP and self.is_neuron(module) else None

    def is_elementwise(self, module: nn.Module) -> bool:
        plain = _ours(module, _ELEMENTWISE) or (_ours(module, _RECURRENT) and not module.all_to_all)
        return plain and not module.inhibition and not module.state_quant and not self._vectors(module)

    def channel_dim(self, module: nn.Module, ndim: int) -> int | None:
        if self.channel_tensors(module) is None:
            return None
        vectors = self._vectors(module)
        dim = ndim - next(iter(vectors.values())) if vectors else 1
        return dim if 1 <= dim < ndim else None

    def channel_tensors(self, module: nn.Module) -> dict[str, int] | None:
        if not _ours(module, _ELEMENTWISE) or module.inhibition or module.state_quant:
            return {} if self.is_elementwise(module) else None
        vectors, own = self._vectors(module), dict(_constants(module))
        if len(set(vectors.values())) > 1 or any(max(own[name].shape) != own[name].numel() for name in vectors):
            return None
        return {name: own[name].dim() - from_right for name, from_right in vectors.items()}

    def _vectors(self, module: nn.Module) -> dict[str, int]:
        """Per-channel constants -> where their one long dim is, counted from the right (1 is the last dim)."""
        return {
            name: tensor.dim() - int(torch.tensor(tensor.shape).argmax())
            for name, tensor in _constants(module)
            if tensor.numel() > 1
        }

    def output_domain(self, module: nn.Module) -> Domain:
        graded = getattr(module, "graded_spikes_factor", None)
        if not _ours(module, _STEP) or isinstance(graded, nn.Parameter) or module.state_quant:
            return REAL
        return SPIKE if isinstance(graded, Tensor) and bool((graded == 1).all()) else REAL

    def flops_per_element(self, module: nn.Module) -> float:
        return _STEP.get(type(module).__name__, (0, 10.0))[1]


def _state_arguments(module: nn.Module) -> int:
    """How many states a call takes: those that it returns, and a recurrent layer's spikes."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _STEP]
    return _STEP[names[0]][0] + (names[0] in _RECURRENT) if names else 1


def _has_matrix(module: Any) -> bool:
    return _ours(module, _LSTM) or (_ours(module, _RECURRENT) and bool(module.all_to_all))


def _constants(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Decay, threshold and gain of a neuron: its own parameters and those buffers that are not state."""
    names = ("alpha", "beta", "threshold", "graded_spikes_factor", "V")
    return [(name, value) for name in names if isinstance(value := getattr(module, name, None), Tensor)]


def _spike_dtype(module: Any, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    with torch.no_grad():
        spikes: Tensor = module.spike_grad(torch.zeros(1, dtype=dtype, device=device))
    gain: Tensor = module.graded_spikes_factor
    return torch.promote_types(spikes.dtype, gain.dtype) if gain.dim() else spikes.dtype
