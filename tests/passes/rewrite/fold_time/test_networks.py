"""Networks of the field, folded for several numbers of steps, against the loop as the user wrote it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import facts
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, check, images

_STATELESS = ("conv", "linear", "norm", "pool")


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
}  # fmt: skip
NAMES = [name for name, case in CASES.items() if importlib.util.find_spec(case.needs)]


@pytest.mark.parametrize("steps", [1, 2, 5, 25])
@pytest.mark.parametrize("name", NAMES)
def test_folded_computes_what_the_loop_computes(name: str, steps: int) -> None:
    case = CASES[name]
    module, inputs = case.build(steps)
    check(module, inputs, fires=steps >= 5, **case.dims(steps))


@pytest.mark.parametrize("name", NAMES)
def test_the_size_does_not_depend_on_the_number_of_steps(name: str) -> None:
    case = CASES[name]
    sizes = []
    for steps in (5, 25):
        module, inputs = case.build(steps)
        graph = check(module, inputs, fires=False, **case.dims(steps))
        sizes.append(len(graph.graph.nodes))
        if not case.recurrent:
            assert _repeated(graph) == []
    assert sizes[0] == sizes[1]


def _repeated(graph: SpikeGraph) -> list[str]:
    """Layers without state that stand more than once, or inside a loop."""
    found: list[str] = []
    seen: set[Any] = set()
    for node in graph.graph.nodes:
        inside = list(node.target.nodes()) if isinstance(node.target, Loop) else []
        found += [inner.name for inner in inside if kinds.kind_of(inner) in _STATELESS]
        layer = _layer(node)
        found += [node.name] if layer in seen else []
        seen |= {layer} if layer is not None else set()
    return found


def _layer(node: fx.Node) -> Any:
    """What tells a layer from others: the tensors that it reads, or the line of a pooling."""
    kind = kinds.kind_of(node)
    if kind not in _STATELESS:
        return None
    tensors = tuple(source.target for source in node.all_input_nodes if source.op == "get_attr")
    return (kind, tensors) if tensors else (kind, node.target, facts.origin(node).file, facts.origin(node).line)
