"""SpikingJelly's networks of the zoo. It is imported by the factories, so that the zoo imports without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _materialise(model: nn.Module) -> nn.Module:
    """Give a network made on the meta device real tensors, freshly initialised."""
    for module in model.modules():
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]
    return model


def _neurons() -> dict[str, Any]:
    from spikingjelly.activation_based import neuron, surrogate

    return {"spiking_neuron": neuron.LIFNode, "surrogate_function": surrogate.ATan(), "detach_reset": True}


def _in_mode(model: nn.Module, mode: str) -> nn.Module:
    from spikingjelly.activation_based import functional

    functional.set_step_mode(model, mode)
    return model


def sew_resnet(depth: int) -> Callable[[str], nn.Module]:
    def factory(mode: str) -> nn.Module:
        from spikingjelly.activation_based.model import sew_resnet

        build = getattr(sew_resnet, f"sew_resnet{depth}")
        return _in_mode(build(cnf="ADD", num_classes=10, **_neurons()), mode)

    return factory


def small_sew(mode: str) -> Callable[[], nn.Module]:
    """SpikingJelly's own SEW-ResNet class with one block a stage and bottleneck-free narrow stem."""

    def factory() -> nn.Module:
        from spikingjelly.activation_based.model import sew_resnet

        net = sew_resnet.SEWResNet(sew_resnet.BasicBlock, [1, 1, 1, 1], num_classes=10, cnf="ADD", **_neurons())
        del net.layer3[0], net.layer4[0]
        net.fc = type(net.fc)(128, 10)
        return _in_mode(net, mode)

    return factory


def spiking_resnet18(mode: str) -> nn.Module:
    from spikingjelly.activation_based.model import spiking_resnet

    return _in_mode(spiking_resnet.spiking_resnet18(num_classes=10, **_neurons()), mode)


def spiking_vgg11_bn(mode: str) -> nn.Module:
    """Spiking VGG11 with its classifier (120 million weights) made narrow."""
    from spikingjelly.activation_based import layer, neuron
    from spikingjelly.activation_based.model import spiking_vgg

    with torch.device("meta"):
        net: Any = spiking_vgg.SpikingVGG(
            [8, "M", 16, "M", 16, 16, "M", 32, 32, "M", 32], batch_norm=True, init_weights=False, **_neurons()
        )
    net.avgpool = layer.AdaptiveAvgPool2d((2, 2))
    net.classifier = nn.Sequential(layer.Linear(128, 32), neuron.LIFNode(), layer.Dropout(0.2), layer.Linear(32, 10))
    return _in_mode(_materialise(net), mode)


def plif_net(name: str, channels: int) -> Callable[[str], nn.Module]:
    def factory(mode: str) -> nn.Module:
        from spikingjelly.activation_based import neuron
        from spikingjelly.activation_based.model import parametric_lif_net

        arguments = {**_neurons(), "spiking_neuron": neuron.ParametricLIFNode}
        return _in_mode(getattr(parametric_lif_net, name)(channels=channels, **arguments), mode)

    return factory


def ms_resnet() -> nn.Module:
    from spikingjelly.activation_based.model import ms_resnet

    return ms_resnet.MSResNet(T=2, num_classes=10, layers=(1, 1, 1), base_channels=8, stem_kernel_size=3, stem_stride=1)


def max_resnet() -> nn.Module:
    from spikingjelly.activation_based.model import ms_resnet

    arguments = {"layers": (1, 1, 1), "stage_channels": (8, 16, 16), "base_channels": 8}
    return ms_resnet.MaxResNet(T=2, num_classes=10, stem_kernel_size=3, stem_stride=1, **arguments)


def spikformer() -> nn.Module:
    from spikingjelly.activation_based.model import spikformer

    sizes = {"img_size_h": 32, "img_size_w": 32, "patch_size": 4, "embed_dims": 32, "num_heads": 4, "depths": 1}
    return spikformer.Spikformer(T=2, num_classes=10, **sizes)


def qkformer() -> nn.Module:
    from spikingjelly.activation_based.model import qkformer

    return qkformer.QKFormer(T=2, num_classes=10, embed_dims=32, num_heads=(1, 2, 4), depths=(1, 1, 1))


def maxformer() -> nn.Module:
    from spikingjelly.activation_based.model import maxformer

    return maxformer.MaxFormer(T=2, num_classes=10, embed_dims=32, depths=(1, 1, 1), cifar=True)


def spike_driven_transformer() -> nn.Module:
    from spikingjelly.activation_based.model import spike_driven_transformer as sdt

    return sdt.SpikeDrivenTransformer(T=2, num_classes=10, embed_dims=32, num_heads=4, depths=1)


def dvs_ntchw() -> nn.Module:
    """An event-camera network whose data lie as [N, T, C, H, W], as the field's data loaders give them."""
    from spikingjelly.activation_based import layer, neuron

    class Events(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stages = [(2, 6), (6, 8)]
            parts = [
                part
                for wide, out in stages
                for part in (layer.Conv2d(wide, out, 3, padding=1), layer.BatchNorm2d(out), neuron.LIFNode())
            ]
            self.features = nn.Sequential(*parts, layer.MaxPool2d(2), layer.Flatten())
            self.head = layer.Linear(8 * 64, 5)

        def forward(self, x: Tensor) -> Tensor:
            frames = x.permute(1, 0, 2, 3, 4)
            result: Tensor = self.head(self.features(frames)).mean(0)
            return result

    return _in_mode(Events(), "m")
