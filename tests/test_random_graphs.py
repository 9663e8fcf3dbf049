"""Random layer graphs under random placements, against the network in one process.

Hypothesis draws a network (convolutions of all kinds, norms, spikes, pooling, arithmetic, concatenation, chunks, heads)
and a rule of the sharding table for each layer that deals out channels. Whatever is drawn must lower, pass the dry run,
and give the outputs, gradients and buffers of the network itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from snnpart import simulate
from snnpart.costs import CPU
from snnpart.passes.decide import decide
from snnpart.passes.decide.lanes import find_lanes
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from tests.lowering import analysed, assert_parity, fire

WIDTHS = (2, 3, 4, 6, 7, 12)


class Step(nn.Module):
    """One layer of the random network: reads values by index, appends one. `layers` are its modules."""

    def __init__(self, kind: str, sources: tuple[int, ...], layers: tuple[nn.Module, ...], size: int) -> None:
        super().__init__()
        self.kind, self.sources, self.size = kind, sources, size
        self.layers = nn.ModuleList(layers)

    def forward(self, values: list[Tensor]) -> Tensor:
        return APPLY[self.kind](self, *(values[i] for i in self.sources))


def _layer(step: Step, x: Tensor, *_: Tensor) -> Tensor:
    return step.layers[0](x)


def _attend(step: Step, x: Tensor, *_: Tensor) -> Tensor:
    """Spiking attention over pixels with two heads, q, k and v from one convolution."""
    q, k, v = (fire(y).reshape(x.shape[0], 2, step.size // 2, -1) for y in step.layers[0](x).chunk(3, 1))
    return ((q @ k.transpose(2, 3)) @ v * 0.1).reshape(x.shape[0], step.size, *x.shape[2:])


def _patches(x: Tensor) -> Tensor:
    """Patches of 2 x 2 pixels as channels, brought back to 4 x 4."""
    small = F.unfold(x, 2, stride=2).reshape(x.shape[0], -1, 2, 2)
    return small.repeat_interleave(2, 2).tile(1, 1, 1, 2)


def _tokens(step: Step, x: Tensor) -> Tensor:
    """A layer of attention over pixels."""
    tokens = x.flatten(2).transpose(1, 2)
    return step.layers[0](tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape)


APPLY: dict[str, Callable[..., Tensor]] = {
    "conv": _layer,
    "conv1": _layer,
    "depthwise": _layer,
    "grouped": _layer,
    "up": lambda s, x, *_: F.avg_pool2d(s.layers[0](x), 2),
    "batch norm": _layer,
    "group norm": _layer,
    "layer norm": _layer,
    "spike": lambda s, x, *_: fire(x - 0.1),
    "pool": lambda s, x, *_: F.max_pool2d(x, 3, 1, 1),
    "gate": lambda s, x, *_: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "cat": lambda s, x, y: s.layers[0](torch.cat([x, y], 1)),
    "add": lambda s, x, y: s.layers[0](x) + s.layers[1](y),
    "attend": _attend,
    "where": lambda s, x, *_: torch.where(x > 0, x, 0.3 * x.flip(2)),
    "channels": lambda s, x, *_: x - x.mean(1, keepdim=True),
    "features": lambda s, x, *_: s.layers[0](x.movedim(1, -1)).movedim(-1, 1),
    "rms": lambda s, x, *_: s.layers[0](x.movedim(1, -1)).movedim(-1, 1),
    "one group": _layer,
    "weight norm": _layer,
    "gated": lambda s, x, *_: F.glu(s.layers[0](x), 1),
    "pixels": lambda s, x, *_: F.pixel_unshuffle(F.pixel_shuffle(s.layers[0](x), 2), 2),
    "patches": lambda s, x, *_: _patches(x),
    "resize": lambda s, x, *_: F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bilinear"),
    "product": lambda s, x, *_: torch.einsum("nc...,cd->nd...", x, s.layers[0].weight),
    "layer of attention": lambda s, x, *_: _tokens(s, x),
}


class Net(nn.Module):
    def __init__(self, steps: list[Step], width: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(step(values))
        return self.head(values[-1].mean((2, 3)))


@st.composite
def networks(draw: Any) -> Net:
    """At most seven steps over images of 4 x 4; each reads the last value, or it and an earlier one."""
    sizes, steps = [2], []
    for kind in ["conv", *draw(st.lists(st.sampled_from(sorted(APPLY)), min_size=2, max_size=6))]:
        last, other = len(sizes) - 1, draw(st.integers(0, len(sizes) - 1))
        size, out = sizes[last], draw(st.sampled_from(WIDTHS))
        sources = (last, other) if kind in ("cat", "add") else (last,)
        made, out = _make(kind, size, sizes[other], out)
        if made is None:
            continue
        steps.append(Step(kind, sources, made, out))
        sizes.append(out)
    return Net(steps, sizes[-1])


def _make(kind: str, size: int, other: int, out: int) -> tuple[tuple[nn.Module, ...] | None, int]:
    """The modules of a step and the channels of its result; None where the kind does not fit the size."""
    if kind in ("conv", "conv1"):
        return (nn.Conv2d(size, out, 1 if kind == "conv1" else 3, padding=int(kind == "conv"), bias=out != 6),), out
    if kind == "depthwise":
        return (nn.Conv2d(size, size, 3, padding=1, groups=size),), size
    if kind == "grouped":
        return ((nn.Conv2d(size, 2 * out, 3, padding=1, groups=2),) if size % 2 == 0 else None), 2 * out
    if kind == "up":
        return (nn.ConvTranspose2d(size, out, 2, stride=2),), out
    if kind == "cat":
        return (nn.Conv2d(size + other, out, 1),), out
    if kind == "add":
        return (nn.Conv2d(size, out, 1), nn.Conv2d(other, out, 3, padding=1)), out
    if kind == "attend":
        return ((nn.Conv2d(size, 3 * out, 1),) if out % 2 == 0 else None), out
    if kind in ("weight norm", "gated", "pixels"):
        made = {"weight norm": out, "gated": 2 * out, "pixels": 4 * out}[kind]
        conv = nn.Conv2d(size, made, 1)
        return (weight_norm(conv) if kind == "weight norm" else conv,), made if kind == "pixels" else out
    if kind == "patches":
        return (), 4 * size
    if kind == "product":
        return (nn.Linear(out, size, bias=False),), out
    if kind == "layer of attention":
        return ((nn.MultiheadAttention(size, 2, batch_first=True),) if size % 2 == 0 else None), size
    norms = {
        "batch norm": nn.BatchNorm2d(size), "group norm": nn.GroupNorm(2 - size % 2, size),
        "features": nn.LayerNorm(size), "rms": nn.RMSNorm(size), "one group": nn.GroupNorm(1, size),
    }  # fmt: skip
    return ((norms[kind],) if kind in norms else (nn.LayerNorm(4),) if kind == "layer norm" else ()), size


@pytest.mark.parametrize("tp", [2, 3, 4])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(net=networks(), data=st.data())
def test_any_network_under_any_placement_equals_one_process(tp: int, net: Net, data: st.DataObject) -> None:
    torch.manual_seed(0)
    module = net.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    inputs = (torch.randn(5, 2, 4, 4, dtype=torch.float64),)
    graph = analysed(module, inputs)
    groups = find_lanes(graph, tp).groups
    pinned = {group.path: data.draw(st.sampled_from(group.rules), label=group.path) for group in groups}
    plan = decide(graph, tp=tp, pp=1, profile=CPU, pinned=Plan(tp=tp, shards=pinned))
    program = lower(graph, plan, profile=CPU)
    simulate.dry_run(program)
    assert_parity(module, inputs, program)
