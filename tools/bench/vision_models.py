"""The networks of the vision benchmarks: SpikingJelly's own, T = 4, 1000 classes, and the same wrapped for images.

`config(name, size)` is what SpikingJelly's trainer takes; `network(name, size)` is the module that its builder makes
from it, called on images [N, 3, H, W] as the trainer calls it: the image at every step, the mean of the answers over T.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

T, CLASSES = 4, 1000
NAMES = ("SEW-ResNet34", "Spikformer-S")


def config(name: str, size: int) -> Any:
    """The model configuration of SpikingJelly 2.0.0."""
    from spikingjelly.activation_based.model.sew_resnet import SEWResNet34Config
    from spikingjelly.activation_based.model.spikformer import SpikformerConfig

    common = {"time_steps": T, "num_classes": CLASSES, "step_mode": "m"}
    if name == "SEW-ResNet34":
        return SEWResNet34Config(**common, image_size=size)
    return SpikformerConfig(**common, image_height=size, image_width=size)


class OverTime(nn.Module):
    """Images [N, 3, H, W] -> answers [N, classes] of a network over [T, N, 3, H, W]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x.unsqueeze(0).repeat(T, 1, 1, 1, 1))
        return out.mean(0)


def network(name: str, size: int) -> nn.Module:
    """The network on the CPU, at its default initialisation."""
    made = config(name, size)
    return OverTime(made.get_builder_cls()(made)._build_canonical_model())
