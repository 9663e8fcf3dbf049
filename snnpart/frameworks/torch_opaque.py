"""torch's own modules, and modules that no framework's adapter knows.

Recurrent and attention modules of torch run fused kernels, and a ScriptModule has no Python to follow: all of them
stay whole. Everything else is traced through.
"""

from __future__ import annotations

import torch
from torch import nn

from snnpart import compat
from snnpart.frameworks.adapter import Adapter

_OPAQUE = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    torch.jit.ScriptModule,
)


class TorchAdapter(Adapter):
    """The adapter of last resort: torch's fused modules are leaves, no module is a neuron."""

    def knows(self, module: nn.Module) -> bool:
        return True

    def is_leaf(self, module: nn.Module) -> bool:
        return isinstance(module, _OPAQUE)

    def transient_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset({"_flat_weights", "_flat_weight_refs"}) if isinstance(module, nn.RNNBase) else frozenset()

    def finish(self, module: nn.Module) -> None:
        if isinstance(module, nn.RNNBase):
            compat.refresh_flat_weights(module)
