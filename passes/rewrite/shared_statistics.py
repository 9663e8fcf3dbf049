"""Norms over the sharded dim: mean and variance of the whole from every rank's own (`ops_norm` has the formula).

The norm becomes three nodes: the rank's moments, their gather over tp, whose gradient is summed over the ranks, and the
norm of the rank's part with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import facts, ops, ops_norm
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, Pieces, Sharded, TimeRole, Value

STATISTICS = "statistics"
"""The rule of a norm that shares its statistics."""

_GROUP = frozenset({torch.group_norm, F.group_norm})
_RMS = frozenset({torch.rms_norm, F.rms_norm})
Add = Callable[[fx.Node, Any, tuple[Any, ...], Value, TimeRole | None], fx.Node]


def is_group_norm(node: fx.Node) -> bool:
    return node.target in _GROUP


def statistics_us(profile: MachineProfile, node: fx.Node, tp: int) -> float:
    """Microseconds of the messages: the moments gathered forward, their gradient scattered backward."""
    value = facts.need(node, Value)
    numbers = 2 * value.shape[0] * value.shape[1] if is_group_norm(node) else 2 * tp * _rows(node, value)
    once = profile.all_gather_us("tp", numbers * value.dtype.itemsize, tp)
    return once * (2 if value.requires_grad else 1)


def _rows(node: fx.Node, value: Value) -> int:
    return int(torch.Size(value.shape[: len(value.shape) - _dims(node)]).numel())


def _dims(node: fx.Node) -> int:
    sizes: Any = node.args[1]
    return len(sizes)


def with_statistics(
    node: fx.Node, inputs: dict[fx.Node, fx.Node], lane: Sharded, rank: int, profile: MachineProfile, add: Add
) -> tuple[Any, tuple[Any, ...]]:
    """The call that stands for the norm on this rank, its moments and their gather having been added."""
    x: fx.Node = node.args[0]  # type: ignore[assignment]
    tp = len(lane.pieces)
    if is_group_norm(node):
        scale, shift, eps = (_given(node, i, inputs) for i in (2, 3, 4))
        gathered = _gather(x, inputs[x], ops_norm.channel_moments, (), lane.pieces, 2, profile, add)
        return ops_norm.group_normalized, (
            inputs[x], gathered, lane.pieces[rank], node.args[1], scale, shift, 1e-5 if eps is None else eps
        )  # fmt: skip
    centred, dims = node.target not in _RMS, _dims(node)
    rest = [_given(node, i, inputs) for i in ((2, 3, 4) if centred else (2, 3))]
    scale, shift, eps = rest if centred else (rest[0], None, rest[1])
    one_each = tuple(((r, r + 1),) for r in range(tp))
    gathered = _gather(x, inputs[x], ops_norm.moments, (dims, centred), one_each, 0, profile, add)
    others = torch.Size(facts.need(x, Value).shape[-dims:]).numel() // sum(lane.size(r) for r in range(tp))
    counts = tuple(lane.size(r) * others for r in range(tp))
    return ops_norm.normalized, (inputs[x], gathered, counts, scale, shift, eps, centred)


_NAMES = ("input", "normalized_shape", "weight", "bias", "eps")


def _given(node: fx.Node, index: int, inputs: dict[fx.Node, fx.Node]) -> Any:
    """An argument of the norm, a tensor as the rank holds it; None where there is none."""
    name = _NAMES[index] if node.target not in _RMS or index < 3 else "eps"
    found = node.args[index] if len(node.args) > index else node.kwargs.get(name)
    if found is None and name == "eps" and node.target not in _RMS:
        return 1e-5
    return inputs[found] if isinstance(found, fx.Node) else found


def _gather(
    x: fx.Node,
    local: fx.Node,
    function: Any,
    options: tuple[Any, ...],
    pieces: tuple[Pieces, ...],
    dim: int,
    profile: MachineProfile,
    add: Add,
) -> fx.Node:
    """The moments of what the rank holds, and of all ranks."""
    held, tp = facts.need(local, Value), len(pieces)
    whole: tuple[int, ...]
    if function is ops_norm.channel_moments:
        shape, slopes = (2, *held.shape[:2]), (0, *held.slopes[:2])
        whole = (2, held.shape[0], sum(stop - start for own in pieces for start, stop in own))
    else:
        kept, ones = len(held.shape) - options[0], options[0]
        shape, slopes = (1, 2, *held.shape[:kept], *(1,) * ones), (0, 0, *held.slopes[:kept], *(0,) * ones)
        whole = (tp, *shape[1:])
    dtype = ops_norm.wide(held.dtype)
    own = Value(shape, dtype, slopes, (), held.requires_grad)
    time = _behind(facts.get(x, TimeRole), 1 if function is ops_norm.channel_moments else 2)
    made = add(x, function, (local, *options), own, time)
    value = Value(whole, dtype, slopes, (), held.requires_grad)
    gathered = add(x, ops.all_gather, (made, "tp", dim, pieces, None, True), value, time)
    once = profile.all_gather_us("tp", value.bytes, tp)
    facts.put(gathered, Cost(forward_us=once, backward_us=once if value.requires_grad else 0.0))
    return gathered


def _behind(time: TimeRole | None, dims: int) -> TimeRole | None:
    """Where time is behind so many dims more."""
    return time if time is None or time.dim is None else replace(time, dim=time.dim + dims)
