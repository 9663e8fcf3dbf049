"""What a stage holds: the living tensors of a forward and a backward are counted, beside what the graph says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import parallelize
from snnpart.live_bytes import LiveBytes
from snnpart.runtime.stage import Stage
from tests.neurons import LIF

SHAPE = (4, 3, 16, 16)


class Block(nn.Module):
    """Convolution, norm, neuron and an addition."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm, self.neuron = nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), LIF()
        self.short = nn.Conv2d(inside, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.neuron(self.norm(self.conv(x))) + self.short(x)
        return out


def plain() -> nn.Module:
    return nn.Sequential(Block(3, 8), nn.MaxPool2d(2), Block(8, 8), nn.Flatten(), nn.Linear(512, 5))


def multi_step() -> nn.Module:
    """A framework's neurons, over [T, N, C, H, W]."""
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    parts: list[nn.Module] = []
    for inside, kind in ((3, neuron.LIFNode), (8, neuron.ParametricLIFNode), (8, neuron.IFNode)):
        conv = layer.Conv2d(inside, 8, 3, padding=1, bias=False, step_mode="m")
        parts += [conv, layer.BatchNorm2d(8, step_mode="m"), kind(step_mode="m")]
    return nn.Sequential(*parts, layer.MaxPool2d(2, step_mode="m"))


@pytest.mark.parametrize(("make", "steps"), [(plain, ()), (multi_step, (4,))], ids=["plain", "multi-step"])
@pytest.mark.parametrize("place", [0, 1])
def test_forward_and_backward_hold_what_is_said(make: Any, steps: tuple[int, ...], place: int) -> None:
    """Of the second stage what it receives is made here, before the count."""
    torch.manual_seed(0)
    x = torch.rand(*steps, *SHAPE)
    layout = "TNCHW" if steps else "NCHW"
    program = parallelize(make(), example_inputs=x, input_layout=layout, pp=2, microbatches=1, verify="off")
    compiled = program.compiled
    values = {name: info.tensor for name, info in compiled.source.tensors.items()}
    received: list[Tensor] = []
    for index in range(place + 1):
        stage = Stage([compiled.stage(index, 0)], values, torch.device("cpu"))
        counter = LiveBytes()
        with counter:
            given = [value.detach().clone().requires_grad_(value.requires_grad) for value in received]
            outputs = stage.forward(stage.bind(compiled, 0)[index], [x], given, compiled.source.batch)
            forward, saved = counter.peak, counter.now
            roots = [out for out in outputs if out.requires_grad]
            counter.forget_peak()
            torch.autograd.backward(roots, [torch.ones_like(out) for out in roots])
            backward = counter.peak
        received = list(outputs)
    said = compiled.stage(place, 0).footprint
    assert said.saved == pytest.approx(saved, rel=0.03)
    assert said.saved + said.forward == pytest.approx(forward, rel=0.05)
    assert said.saved + said.first_backward == pytest.approx(backward, rel=0.05)
