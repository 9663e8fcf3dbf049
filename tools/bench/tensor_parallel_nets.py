"""The networks of the tensor-parallel benchmark whose steps are timed, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.calibrate import Spike

STEPS = 4


@dataclass(frozen=True)
class Net:
    """A network with example inputs of a batch; `layout` says where time is (None: [N, ...])."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    layout: str | None
    batches: tuple[int, ...]

    def options(self, batch: int) -> dict[str, Any]:
        """What `parallelize` is told."""
        layout = {} if self.layout is None else {"input_layout": self.layout}
        return {"example_inputs": self.inputs(batch), "verify": "off", **layout}


def images(size: int) -> Callable[[int], Tensor]:
    """Static images shown for `STEPS` steps."""
    return lambda batch: torch.rand(STEPS, batch, 3, size, size)


def sew_resnet18() -> nn.Module:
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import sew_resnet

    model: nn.Module = sew_resnet.sew_resnet18(cnf="ADD", spiking_neuron=neuron.LIFNode, num_classes=10)
    functional.set_step_mode(model, "m")
    return model


def spiking_vgg11() -> nn.Module:
    """With the head that small images take: one layer behind the mean over places. The head for ImageNet has nine
    tenths of the parameters, and four plans of it do not fit into a small machine's memory at once."""
    from spikingjelly.activation_based import functional, layer, neuron
    from spikingjelly.activation_based.model import spiking_vgg

    model = spiking_vgg.spiking_vgg11_bn(spiking_neuron=neuron.LIFNode, num_classes=10)
    model.avgpool, model.classifier = layer.AdaptiveAvgPool2d((1, 1)), layer.Linear(512, 10)
    functional.set_step_mode(model, "m")
    return model  # type: ignore[no-any-return]


def spikformer() -> nn.Module:
    from spikingjelly.activation_based.model.spikformer import Spikformer

    sizes = {"img_size_h": 32, "img_size_w": 32, "patch_size": 4, "embed_dims": 256, "depths": 2, "num_classes": 10}
    return Spikformer(T=STEPS, **sizes)


class Dense(nn.Module):
    """Wide linear layers with spikes between them: most of the time is weights."""

    def __init__(self, width: int = 2048, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Spike.apply(layer(x) - 0.1)  # type: ignore[no-untyped-call]
        return x


NETS = {
    "sew_resnet18": Net(sew_resnet18, images(32), "TNCHW", (2, 8, 16)),
    "spiking_vgg11": Net(spiking_vgg11, images(32), "TNCHW", (2, 8, 16)),
    "spikformer": Net(spikformer, images(32), "TNCHW", (1, 2, 4)),
    "dense": Net(Dense, lambda batch: torch.randn(batch, 2048), None, (4, 64, 256)),
}
