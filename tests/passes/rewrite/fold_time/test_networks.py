"""Networks of the field, folded for several numbers of steps, against the loop as the user wrote it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.calibrate import fire
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, check, fold, images, repeated, traced
from tests.zoo_models import KeepDtype
from tools.bench import time_folding_nets


@dataclass(frozen=True)
class Case:
    """A network by its number of steps, its input by the number of steps, and how it is traced."""

    make: Callable[[int], nn.Module]
    shape: Callable[[int], tuple[int, ...]]
    needs: str = "torch"
    dims: Callable[[int], dict[str, Any]] = lambda steps: {}
    dtype: torch.dtype = torch.float64
    scale: float = 2.0
    recurrent: bool = False
    evaluate: bool = False

    def build(self, steps: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(3)
        module = active(self.make(steps), self.dtype, self.scale)
        return module.train(not self.evaluate), (images(*self.shape(steps), dtype=self.dtype),)


def _spikingjelly(steps: int) -> nn.Module:
    """A residual network in step mode s: one step a call, the loop is the caller's."""
    from spikingjelly.activation_based import layer, neuron

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1, self.sn1 = layer.Conv2d(2, 4, 3, padding=1), layer.BatchNorm2d(4), neuron.LIFNode()
            self.conv2, self.bn2 = layer.Conv2d(4, 4, 3, padding=1), layer.BatchNorm2d(4)
            self.sn2 = neuron.ParametricLIFNode()
            self.pool, self.drop = layer.MaxPool2d(2), layer.Dropout(0.3)
            self.fc, self.sn3 = layer.Linear(36, 5), neuron.IFNode()

        def forward(self, x: Tensor) -> Tensor:
            y = self.sn1(self.bn1(self.conv1(x)))
            y = y + self.sn2(self.bn2(self.conv2(y)))
            result: Tensor = self.sn3(self.fc(self.drop(self.pool(y).flatten(1))))
            return result

    return Net()


def _sew(steps: int, narrower: int) -> nn.Module:
    """The benchmark's SEW-ResNet18 in step mode s, with a fraction of its channels, active."""
    from spikingjelly.activation_based import functional, layer

    net = time_folding_nets.sew_resnet(18, "s")
    for name, old in list(net.named_modules()) if narrower > 1 else ():
        if isinstance(old, nn.Conv2d):
            channels = old.in_channels // narrower or old.in_channels, old.out_channels // narrower
            conv = layer.Conv2d(*channels, old.kernel_size, old.stride, old.padding, bias=False)  # type: ignore[arg-type]
            net.set_submodule(name, conv)
        elif isinstance(old, nn.BatchNorm2d):
            net.set_submodule(name, layer.BatchNorm2d(old.num_features // narrower))
        elif isinstance(old, nn.Linear):
            net.set_submodule(name, layer.Linear(old.in_features // narrower, old.out_features))
    net, x = net.double(), images(2, 3, 32, 32)
    fire(net, lambda: [net(x) for _ in range(steps)])
    functional.reset_net(net)
    return net


def _snntorch(steps: int) -> nn.Module:
    """The benchmark's network with a surrogate that keeps float64."""
    net = time_folding_nets.ConvNet(steps)
    for lif in (net.lif1, net.lif2, net.lif3):
        lif.spike_grad = KeepDtype.apply
    return net


def _frames(steps: int) -> dict[str, Any]:
    return {"in_dims": 0, "time_dims": 1}


CASES = {
    "snntorch_conv": Case(nets.ConvLoop, lambda t: (2, 1, 10, 10), "snntorch"),
    "snntorch_synaptic": Case(
        lambda t: nets.SnnTorchLoop("Synaptic", t, alpha=0.9, beta=0.8, learn_alpha=True), lambda t: (3, 6), "snntorch"
    ),
    "snntorch_alpha": Case(
        lambda t: nets.SnnTorchLoop("Alpha", t, alpha=0.9, beta=0.7), lambda t: (3, 6), "snntorch", scale=5.0
    ),
    "snntorch_rleaky": Case(nets.RLeakyLoop, lambda t: (3, t, 6), "snntorch", _frames, recurrent=True),
    "norse_sequential": Case(nets.NorseLoop, lambda t: (2, 1, 6, 6), "norse", scale=4.0),
    "norse_lsnn": Case(
        nets.LsnnLoop, lambda t: (t, 2, 6), "norse", lambda t: {"in_dims": 1, "time_dims": 0}, torch.float32, 1.0, True
    ),
    "handwritten_scaled": Case(nets.Scaled, lambda t: (3, t, 4), "torch", _frames, evaluate=True),
    "handwritten_residual": Case(nets.Residual, lambda t: (2, 2, 5, 5)),
    "spikingjelly_step": Case(
        _spikingjelly, lambda t: (2, 2, 6, 6), "spikingjelly", lambda t: {"time_steps": t}, scale=4.0
    ),
    "spikingjelly_frames": Case(
        _spikingjelly, lambda t: (2, t, 2, 6, 6), "spikingjelly", lambda t: {"time_steps": t, "time_dims": 1}, scale=4.0
    ),
    "bench_snntorch": Case(_snntorch, lambda t: (2, 1, 28, 28), "snntorch"),
    "bench_norse": Case(
        lambda t: time_folding_nets.Sequential(t, 2), lambda t: (2, 3, 32, 32), "norse", scale=5.0
    ),
    "bench_handwritten": Case(lambda t: time_folding_nets.Handwritten(t, 3), lambda t: (2, 3, 8, 8)),
    "bench_sew_resnet18_narrow": Case(
        lambda t: _sew(t, 16), lambda t: (2, 3, 32, 32), "spikingjelly", lambda t: {"time_steps": t}
    ),
}  # fmt: skip
WHOLE = Case(lambda t: _sew(t, 1), lambda t: (2, 3, 32, 32), "spikingjelly", lambda t: {"time_steps": t})
NAMES = [name for name, case in CASES.items() if importlib.util.find_spec(case.needs)]


@pytest.mark.parametrize("steps", [1, 2, 5, 25])
@pytest.mark.parametrize("name", NAMES)
def test_folded_computes_what_the_loop_computes(name: str, steps: int) -> None:
    case = CASES[name]
    module, inputs = case.build(steps)
    check(module, inputs, fires=steps >= 5, **case.dims(steps))


@pytest.mark.all
@pytest.mark.skipif(importlib.util.find_spec("spikingjelly") is None, reason="needs SpikingJelly")
@pytest.mark.parametrize("steps", [1, 2, 5, 25])
def test_sew_resnet18_computes_what_its_loop_computes(steps: int) -> None:
    module, inputs = WHOLE.build(steps)
    assert repeated(check(module, inputs, **WHOLE.dims(steps))) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_size_does_not_depend_on_the_number_of_steps(name: str) -> None:
    """That they compute the same is tested above."""
    case = CASES[name]
    sizes = []
    for steps in (5, 25):
        module, inputs = case.build(steps)
        graph = fold(traced(module, inputs, **case.dims(steps)))
        sizes.append(len(graph.graph.nodes))
        if not case.recurrent:
            assert repeated(graph) == []
    assert sizes[0] == sizes[1]
