"""Networks that users expect by name: thin factories over SpikingJelly's models.

Each takes images [N, C, H, W] and gives logits [N, classes]: the image is repeated over T inside, where hoist-invariant
finds it, and the logits are the mean over T. `network` holds SpikingJelly's own module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from snnpart.errors import ConfigError


class RepeatedImage(nn.Module):
    """A multi-step network that sees one image at each of T steps; [N, C, H, W] to the mean over T, [N, K]."""

    def __init__(self, network: nn.Module, time_steps: int) -> None:
        super().__init__()
        self.network, self.time_steps = network, time_steps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x.unsqueeze(0).repeat(self.time_steps, *[1] * x.dim()))
        return out.mean(0) if out.dim() > 2 else out


def sew_resnet18(time_steps: int = 4, num_classes: int = 1000, **options: Any) -> nn.Module:
    """SEW-ResNet-18 with LIF neurons (Fang et al., 2021). `options` go to SpikingJelly's factory."""
    return _sew_resnet("sew_resnet18", time_steps, num_classes, options)


def sew_resnet34(time_steps: int = 4, num_classes: int = 1000, **options: Any) -> nn.Module:
    """SEW-ResNet-34 with LIF neurons (Fang et al., 2021). `options` go to SpikingJelly's factory."""
    return _sew_resnet("sew_resnet34", time_steps, num_classes, options)


def sew_resnet50(time_steps: int = 4, num_classes: int = 1000, **options: Any) -> nn.Module:
    """SEW-ResNet-50 with LIF neurons (Fang et al., 2021). `options` go to SpikingJelly's factory."""
    return _sew_resnet("sew_resnet50", time_steps, num_classes, options)


def _sew_resnet(name: str, time_steps: int, num_classes: int, options: dict[str, Any]) -> nn.Module:
    neuron = _spikingjelly("neuron")
    chosen = {"cnf": "ADD", "spiking_neuron": neuron.LIFNode, "detach_reset": True, **options}
    network = getattr(_spikingjelly("model.sew_resnet"), name)(num_classes=num_classes, **chosen)
    return _multi_step(network, time_steps)


def spiking_vgg11(time_steps: int = 4, num_classes: int = 1000, **options: Any) -> nn.Module:
    """Spiking VGG-11 with batch normalisation and LIF neurons. `options` go to SpikingJelly's factory."""
    neuron, layer = _spikingjelly("neuron"), _spikingjelly("layer")
    chosen = {"norm_layer": layer.BatchNorm2d, "spiking_neuron": neuron.LIFNode, "detach_reset": True, **options}
    network = _spikingjelly("model.spiking_vgg").spiking_vgg11_bn(num_classes=num_classes, **chosen)
    return _multi_step(network, time_steps)


def spikformer_s(time_steps: int = 4, num_classes: int = 1000, image_size: int = 224, **options: Any) -> nn.Module:
    """Spikformer-8-384's small form, 6 blocks of width 384 (Zhou et al., 2023); repeats the image itself."""
    make = _spikingjelly("model.spikformer").spikformer_s
    network = make(T=time_steps, img_size_h=image_size, img_size_w=image_size, num_classes=num_classes, **options)
    return _stepped(network)


def spikformer_cifar10(time_steps: int = 4, num_classes: int = 10, **options: Any) -> nn.Module:
    """Spikformer-4-384 for 32 x 32 images (Zhou et al., 2023); repeats the image itself."""
    return _stepped(
        _spikingjelly("model.spikformer").spikformer_cifar10(T=time_steps, num_classes=num_classes, **options)
    )


def _multi_step(network: nn.Module, time_steps: int) -> nn.Module:
    return RepeatedImage(_stepped(network), time_steps)


def _stepped(network: nn.Module) -> nn.Module:
    _spikingjelly("functional").set_step_mode(network, "m")
    return network


def _spikingjelly(name: str) -> Any:
    try:
        return importlib.import_module(f"spikingjelly.activation_based.{name}")
    except ImportError as error:
        raise ConfigError("the recipes are SpikingJelly's models", fix="pip install snnpart[spikingjelly]") from error


RECIPES: Mapping[str, Callable[..., nn.Module]] = {
    make.__name__: make
    for make in (sew_resnet18, sew_resnet34, sew_resnet50, spikformer_s, spikformer_cifar10, spiking_vgg11)
}
