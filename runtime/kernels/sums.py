"""Gradients of what every sample shares, from the sums over channels that a fused neuron's backward leaves.

Each program of that kernel leaves sums of its own; `over_programs` adds them up, a few channels at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from snnpart.runtime.kernels.neuron_code import Form
from snnpart.runtime.kernels.tiles import columns_for

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_WARPS = 8

if triton is not None:  # its parser looks annotations up: only tl's may stand in a kernel

    @triton.jit  # type: ignore[untyped-decorator]
    def _over_programs(parts, sums, programs, channels, P: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
        ch = tl.program_id(0) * B + tl.arange(0, B)
        program = tl.arange(0, P)
        mask = (program < programs)[:, None] & (ch < channels)[None, :]
        at = (tl.program_id(1) * programs + program)[:, None] * channels + ch[None, :]
        found = tl.sum(tl.load(parts + at, mask=mask, other=0.0), axis=0)
        tl.store(sums + tl.program_id(1) * channels + ch, found, mask=ch < channels)


def over_programs(parts: Tensor) -> Tensor:
    """The sums [K, C] of parts [K, programs, C]."""
    kinds, programs, channels = parts.shape
    sums = parts.new_empty(kinds, channels)
    columns = columns_for(programs)
    grid = (triton.cdiv(channels, columns), kinds)
    _over_programs[grid](parts, sums, programs, channels, triton.next_power_of_2(programs), columns, num_warps=_WARPS)
    return sums


def affine_gradients(form: Form, sums: Mapping[str, Tensor], weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of BatchNorm's weight and bias [C], over all steps."""
    dw, db = ([sums[f"{name}{mark}"] for mark in form.marks] for name in ("sum_dyx", "sum_dy"))
    return _together(dw).to(weight.dtype), _together(db).to(bias.dtype)


def _together(steps: Sequence[Tensor]) -> Tensor:
    """The sum over steps; no kernels where the steps were summed together already."""
    return steps[0] if len(steps) == 1 else torch.stack(list(steps)).sum(0)


def parameter_gradient(sums: Tensor | None, value: Tensor) -> Tensor | None:
    """The gradient of a neuron's parameter: a number a channel, or one for all."""
    if sums is None:
        return None
    return (sums if value.numel() > 1 else sums.sum()).reshape(value.shape).to(value.dtype)
