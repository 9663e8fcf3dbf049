"""nn.MultiheadAttention as plain operations, so that its heads can be dealt out and its tensors have the user's names.

torch computes it in one function with a kernel for inference beside it; what stands here computes the same from its
weights. A layer with dropout, extra keys (`add_bias_kv`, `add_zero_attn`) or other key and value widths stays whole
(`frameworks.torch_opaque`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.trace.recorder import Recorder

Result = tuple[Tensor, Tensor | None]


def attention(recorder: Recorder) -> Callable[..., Result]:
    """The `forward` of the class while tracing."""
    original = nn.MultiheadAttention.forward

    def forward(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Result:
        return original(module, *args, **kwargs) if recorder.paused else attend(module, *args, **kwargs)

    return forward


def attend(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Result:
    """Output, in the layout of `query`, and the weights over the keys [N, L, S] (or of every head) where asked for."""
    batched, shared = query.dim() == 3, key is query and value is query
    inputs = [_batch_first(module, x) for x in ((query,) if shared else (query, key, value))]
    q, k, v = _heads(module, inputs)
    mask = _mask(module, q, k, key_padding_mask, attn_mask)
    causal = is_causal and key_padding_mask is None and not need_weights
    weights: Tensor | None = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, None if causal else mask, 0.0, causal)
    out = F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if weights is not None:
        weights = weights.mean(1) if average_attn_weights else weights
    if not batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return out if module.batch_first else out.transpose(0, 1), weights


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """[N, L, E]."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _heads(module: nn.MultiheadAttention, inputs: list[Tensor]) -> list[Tensor]:
    """Query, key and value as [N, heads, L, D], from one input or three."""
    sizes = (module.num_heads, module.head_dim)
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if len(inputs) == 1:
        x = F.linear(inputs[0], weight, bias)
        return list(x.reshape(*x.shape[:2], 3, *sizes).permute(2, 0, 3, 1, 4).unbind(0))
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    made = [F.linear(x, w, b) for x, w, b in zip(inputs, weight.chunk(3), biases, strict=True)]
    return [x.reshape(*x.shape[:2], *sizes).transpose(1, 2) for x in made]


def _mask(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Both masks as one to add to the scores, which broadcasts over [N, heads, L, S]."""
    found = None if mask is None else _added(mask, q.dtype)
    if found is not None and found.dim() == 3:
        found = found.reshape(q.shape[0], module.num_heads, q.shape[2], k.shape[2])
    if padding is None:
        return found
    away = _added(padding, q.dtype).reshape(q.shape[0], 1, 1, k.shape[2])
    return away if found is None else found + away


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of numbers to add; a Boolean one is True where nothing may be seen."""
    return mask if mask.dtype is not torch.bool else torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
