"""sinabs: stateful layers on [N, T, ...], and their `Squeeze` forms on [N*T, ...] with the batch size written in.

State lives in persistent buffers that take the batch's shape at the first call. A layer that meets another batch size
draws random old states for it, so a reset empties the buffers: the layer then starts from zeros of the right shape.
Thresholds and decays are parameters; spikes are float32 whatever goes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from sinabs.activation import MultiSpike, SingleSpike
from sinabs.layers import StatefulLayer, UnflattenTime
from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.facts import Domain
from snnpart.frameworks.adapter import REAL, SPIKE, Adapter, empty, needs_grad


class SinabsAdapter(Adapter):
    """sinabs 2 and 3."""

    name = "sinabs"
    package = "sinabs"
    buffers_are_state = True

    def is_neuron(self, module: nn.Module) -> bool:
        return isinstance(module, StatefulLayer)

    def reset(self, module: nn.Module) -> None:
        if not isinstance(module, StatefulLayer):
            return
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.zeros(0, dtype=value.dtype, device=value.device)
        for name in ("recordings", "firing_rate"):
            vars(module).pop(name, None)

    def transient_names(self, module: nn.Module) -> frozenset[str]:
        if not isinstance(module, StatefulLayer):
            return frozenset()
        return frozenset({"recordings", "firing_rate", *module._buffers})

    def infer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not _ours(module):
            return NotImplemented
        x: Tensor = args[0] if args else kwargs["input_data"]
        dtype = torch.float32 if module.does_spike else torch.promote_types(x.dtype, torch.float32)
        return empty(x, tuple(x.shape), dtype=dtype, grad=needs_grad(module, x))

    def state_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset(module._buffers) if isinstance(module, StatefulLayer) else frozenset()

    def time_dim(self, module: nn.Module) -> int | None:
        return 1 if self.is_neuron(module) and not _squeezed(module) else None

    def merged_steps(self, module: nn.Module, rows: int) -> int | None:
        if not (self.is_neuron(module) and _squeezed(module)):
            return None
        layer: Any = module
        return rows // layer.batch_size if layer.batch_size > 0 else int(layer.num_timesteps)

    def merge_steps(self, module: nn.Module, steps: int) -> None:
        layer: Any = module
        layer.batch_size, layer.num_timesteps = -1, steps

    def one_step(self, module: nn.Module) -> bool:
        layer: Any = module
        if _squeezed(module):
            self.merge_steps(module, 1)
        layer.record_states = True
        layer.forward = partial(_one_step, layer, dim=0 if _squeezed(module) else 1)
        return True

    def is_elementwise(self, module: nn.Module) -> bool:
        scalars = all(p.dim() == 0 for p in module.parameters())
        return _ours(module) and scalars and not hasattr(module, "rec_connect")

    def channel_dim(self, module: nn.Module, ndim: int) -> int | None:
        dim = 1 if _squeezed(module) else 2
        return dim if self.is_elementwise(module) and ndim > dim else None

    def channel_tensors(self, module: nn.Module) -> dict[str, int] | None:
        return {} if self.is_elementwise(module) else None

    def output_domain(self, module: nn.Module) -> Domain:
        kind = getattr(module, "spike_fn", None)
        if kind is SingleSpike:
            return SPIKE
        return Domain("integer", 0.0) if kind is MultiSpike else REAL

    def flops_per_element(self, module: nn.Module) -> float:
        return 10.0

    def set_batch(self, module: nn.Module, original: nn.Module, size: int, example: int) -> None:
        """The written size shrinks as the batch does: it is not `size` where the rows [N*T] are what is counted."""
        layer: Any = module
        counts = _squeezed(original) or isinstance(original, UnflattenTime)
        written: Any = getattr(original, "batch_size", -1) if counts else -1
        if written <= 0:
            return
        samples, rest = divmod(written * size, example)
        if rest:
            raise ConfigError(
                f"{size} rows are no whole number of samples: {example} rows were {written} samples",
                where=type(module).__name__,
                fix="give batches, and microbatches, of whole samples",
            )
        layer.batch_size = samples


def _ours(module: nn.Module) -> bool:
    """Whether the module is one of the framework's own layers, not a subclass of the user's."""
    return isinstance(module, StatefulLayer) and type(module).__module__.startswith("sinabs.layers")


def _one_step(layer: Any, x: Tensor, dim: int) -> Tensor:
    """One step. What the layer records of its states are they after it: ALIF keeps all but its current on itself."""
    made: Tensor = type(layer).forward(layer, x if dim == 0 else x.unsqueeze(1))
    for name, states in layer.recordings.items():
        layer._buffers[name] = states.squeeze(1)
    return made if dim == 0 else made.squeeze(1)


def _squeezed(module: nn.Module) -> bool:
    return hasattr(module, "squeeze_forward")
