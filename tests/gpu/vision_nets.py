"""The network that `test_vision` trains from the command line, and the images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Subset

from snnpart.vision.data.sources import Split, digits
from snnpart.vision.recipes import RepeatedImage


def few() -> Split:
    """300 digits to train on and 100 to validate with, in three equal channels."""
    whole = digits(channels=3)
    return Split(Subset(whole.training, range(300)), Subset(whole.validation, range(100)), whole.classes)


class Digits(nn.Module):
    """Images [N, 3, 8, 8] in float32 to logits [N, 10] by blocks of SpikingJelly's SEW-ResNet, in float64 if `double`.

    In float64 a sum in another order flips no spike, so that a GPU and a CPU train alike.
    """

    def __init__(self, time_steps: int = 2, double: bool = True) -> None:
        super().__init__()
        from spikingjelly.activation_based import functional

        network = blocks()
        functional.set_step_mode(network, "m")
        self.inner = RepeatedImage(network.double() if double else network, time_steps)
        self.double_inputs = double

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.double() if self.double_inputs else x)
        return out


def blocks() -> nn.Module:
    """A stem, one block of width 16 and one of width 32, which halves the image."""
    from spikingjelly.activation_based import layer, neuron, surrogate
    from spikingjelly.activation_based.model.sew_resnet import BasicBlock

    options: dict[str, Any] = {"surrogate_function": surrogate.ATan(), "detach_reset": True, "v_threshold": 0.5}
    narrower = nn.Sequential(layer.Conv2d(16, 32, 1, stride=2, bias=False), layer.BatchNorm2d(32))
    return nn.Sequential(
        layer.Conv2d(3, 16, 3, padding=1, bias=False),
        layer.BatchNorm2d(16),
        neuron.LIFNode(**options),
        BasicBlock(16, 16, cnf="ADD", spiking_neuron=neuron.LIFNode, **options),
        BasicBlock(16, 32, 2, narrower, cnf="ADD", spiking_neuron=neuron.LIFNode, **options),
        layer.Flatten(),
        layer.Linear(32 * 16, 10),
    )
