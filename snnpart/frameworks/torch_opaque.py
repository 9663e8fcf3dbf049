"""torch's own modules, and modules that no framework's adapter knows.

Recurrent modules and transformer layers of torch run fused kernels, and a ScriptModule has no Python to follow: all of
them stay whole, and so does attention with dropout or extra keys. Everything else is traced through.
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


def _is_plain_attention(module: nn.Module) -> bool:
    """Whether it is attention that the tracer can write out: torch's own forward, one width, nothing drawn or added."""
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
        return False
    plain = module.bias_k is None and not module.add_zero_attn and module.dropout == 0
    return plain and module._qkv_same_embed_dim


class TorchAdapter(Adapter):
    """The adapter of last resort: torch's fused modules are leaves, no module is a neuron."""

    def knows(self, module: nn.Module) -> bool:
        return True

    def is_leaf(self, module: nn.Module) -> bool:
        return isinstance(module, _OPAQUE) and not _is_plain_attention(module)

    def transient_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset({"_flat_weights", "_flat_weight_refs"}) if isinstance(module, nn.RNNBase) else frozenset()

    def finish(self, module: nn.Module) -> None:
        if isinstance(module, nn.RNNBase):
            compat.refresh_flat_weights(module)
