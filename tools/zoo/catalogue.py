"""The networks of this zoo by the letters of the public models they stand for, and the traits that they keep."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.distributed.jobs import layout
from tests.zoo import Model

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Entry(Model):
    """A network: how it is called (see `tests.zoo.Model`), and what is hard about it.

    `training` False runs it in eval mode.
    """

    traits: str
    training: bool = True

    def call(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        """The module called once, or `steps` times with each of its outputs stacked over T at dim 0."""
        if self.steps is None:
            return module(*inputs)
        results = [pytree.tree_flatten(module(*(self.step(x, t) for x in inputs))) for t in range(self.steps)]
        return pytree.tree_unflatten(
            [torch.stack(parts) for parts in zip(*(leaves for leaves, _ in results))], results[0][1]
        )

    def step(self, x: Tensor, t: int) -> Tensor:
        """What the module takes at step t of input x."""
        return x if self.time_dim is None else x.select(self.time_dim, t)

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The network, firing, in its mode, and inputs of `BATCH` samples."""
        module, inputs = self.build()
        return module.train(self.training), inputs

    @property
    def options(self) -> dict[str, Any]:
        """What `parallelize` must be told."""
        if self.time_dim is None:
            return {"in_dims": self.in_dims, "time_steps": self.steps}
        return {"input_layout": layout(self), "time_steps": self.steps}


def of(where: str, *arguments: Any) -> Callable[[], nn.Module]:
    """A factory by name, "module:function", imported when it is called: the frameworks are optional."""

    def factory() -> nn.Module:
        module, _, name = where.partition(":")
        made = getattr(importlib.import_module(f"tools.zoo.{module}"), name)(*arguments)
        return made if isinstance(made, nn.Module) else made()  # type: ignore[no-any-return]

    return factory


def entry(traits: str, where: str, shape: tuple[int, ...], *arguments: Any, **options: Any) -> Entry:
    return Entry(factory=of(where, *arguments), shapes=(shape,), traits=traits, **options)


N = BATCH
IMAGE = (N, 3, 8, 8)
SJ: dict[str, Any] = {"needs": "spikingjelly"}
SNNTORCH: dict[str, Any] = {"needs": "snntorch", "dtype": torch.float32}
SINABS: dict[str, Any] = {"needs": "sinabs", "dtype": torch.float32}
SEW = (
    "in-place unsqueeze_ and repeat after the stem; in-place residual of spikes chosen by a string; grouped bottleneck"
)
DRIVEN = "hook dict through every forward; tuple outputs; rank of the input decides; unused talking heads"
EVERY: dict[str, Entry] = {
    **{f"B01-{how}": entry(SEW, "sew:sew_resnet", IMAGE, how, **SJ) for how in ("ADD", "AND", "IAND")},
    "B02": entry(
        "[N, T] in, permute inside, mean over T; scalar PLIF weights; a list of dicts; width from a dry run",
        "sew:event_net",
        (N, 3, 2, 16, 16),
        time_dim=1,
        **SJ,
    ),
    "B03": entry(
        "unpacked shapes, flatten and back, norm over tokens, heads by reshape, unused norms",
        "spikformer:Spikformer",
        IMAGE,
        **SJ,
    ),
    "B04-static": entry(DRIVEN, "driven:SpikeDriven", IMAGE, **SJ),
    "B04-events-TET": entry(
        f"{DRIVEN}; MaxPool3d over (1, 3, 3); T kept",
        "driven:SpikeDriven",
        (N, 2, 2, 8, 8),
        2,
        8,
        2,
        2,
        True,
        time_dim=1,
        **SJ,
    ),
    "B04-hooked": entry(f"{DRIVEN}; the filled dict is an output", "driven:Hooked", IMAGE, **SJ),
    "B05": entry(
        "integer spikes; a norm that pads with its running averages by slice assignment; 7x7 depthwise; uneven",
        "driven:MetaFormer",
        (N, 3, 16, 16),
    ),
    **{
        f"B06-{name}": entry("token attention sums a head; H and W exchanged", "spikformer:QKFormer", shape, **SJ)
        for name, shape in {"square": (N, 3, 16, 16), "oblong": (N, 3, 16, 24)}.items()
    },
    "B07": entry(
        "module-wide constants and device; step loop that writes output[i]; convolution subclass that fills its result;"
        " norm on transposed axes",
        "resnets:MsResNet",
        IMAGE,
    ),
    "B08": entry(
        "stem once, the rest T times on the same modules; voting in tens; learned slope; membrane changed in place",
        "plif:plif_net",
        (N, 1, 12, 12),
    ),
    "B08-dropout": entry("the same with one dropout mask for the window", "plif:plif_net_dropout", (N, 1, 12, 12)),
    "B09-vgg": entry(
        "one pooling object used four times; membrane starts as 0; surrogate on the instance saves a tensor of its own",
        "resnets:VggSnn",
        (N, 3, 2, 16, 16),
        time_dim=1,
    ),
    "B09-resnet19": entry("T set from outside; norms under two names in state_dict", "resnets:tet_resnet", IMAGE),
    "B10-dense": entry(
        "dense concatenation, widths that divide by nothing; hooks that count; a list of maps summed over T",
        "detection:dense_backbone",
        (3, N, 2, 8, 8),
        in_dims=1,
        time_dim=0,
        **SJ,
    ),
    "B10-depthwise": entry(
        "norm before depthwise convolution; hooks that count; a list of maps summed over T",
        "detection:depthwise_backbone",
        (3, N, 2, 16, 16),
        in_dims=1,
        time_dim=0,
        **SJ,
    ),
    "B11-train": entry(
        "layers from a table with from-indices and a save list; the head writes into its list; maps at two scales",
        "detection:Detector",
        (N, 3, 32, 32),
    ),
    "B11-eval": entry(
        "another structure in eval; cached grids; slice arithmetic in place",
        "detection:Detector",
        (N, 3, 32, 32),
        training=False,
    ),
    "B12-snn": entry(
        "skips over all levels; transposed convolutions; state in persistent buffers that change shape; masked writes",
        "unet:SpikingUNet",
        (N, 3, 16, 16),
        slow=True,
    ),
    "B12-subtract": entry(
        "the same, the threshold subtracted under a mask in place", "unet:SpikingUNet", (N, 3, 16, 16), False, slow=True
    ),
    "B12-recorded": entry(
        "rates recorded without gradient, then a pass with a gradient of its own",
        "unet:RecordedUNet",
        (N, 3, 16, 16),
        slow=True,
    ),
    "B15-explicit": entry(
        "state by hand in a loop; float32 spikes", "snntorch_nets:Explicit", (N, 1, 12, 12), **SNNTORCH
    ),
    "B15-hidden": entry(
        "a Sequential for one step, loop and reset outside, the last layer gives a tuple",
        "snntorch_nets:hidden",
        (N, 1, 12, 12),
        steps=3,
        **SNNTORCH,
    ),
    "B15-closed-over": entry(
        "view(batch_size, -1) with a module-wide batch size", "snntorch_nets:ClosedOver", (N, 1, 12, 12), **SNNTORCH
    ),
    "B16-regression": entry(
        "recurrent matrix inside the neuron, width 9, [T, N] in and out",
        "snntorch_nets:Regression",
        (4, N, 12),
        in_dims=1,
        time_dim=0,
        **SNNTORCH,
    ),
    "B16-autoencoder": entry(
        "hidden state reset inside forward; transposed convolutions; membranes as output",
        "snntorch_nets:AutoEncoder",
        (N, 1, 8, 8),
        **SNNTORCH,
    ),
    "B17-cifar": entry(
        "state passed by hand, None at the start, with holes; noise at each step; shared parameters; max over time",
        "norse_nets:ConvNet",
        (N, 3, 12, 12),
        needs="norse",
    ),
    "B17-nested": entry("nested state with holes as an output", "norse_nets:Nested", (N, 6), needs="norse"),
    "B17-speech": entry(
        "adaptive recurrent cell, noise at each step, max over time",
        "norse_nets:speech",
        (4, N, 7),
        in_dims=1,
        time_dim=0,
        needs="norse",
    ),
    "B18-events": entry(
        "FlattenTime and UnflattenTime with a batch size written in; SumPool2d; 10 channels",
        "sinabs_nets:EventDigits",
        (N, 3, 2, 10, 10),
        time_dim=1,
        **SINABS,
    ),
    "B18-from-model": entry(
        "converted network; scalar parameters of the neurons; state in state_dict",
        "sinabs_nets:Converted",
        (N, 3, 28),
        time_dim=1,
        **SINABS,
    ),
    "B19-layer-by-layer": entry(
        "(t b) in one axis from encoder to head; reset inside forward; frozen thresholds", "braincog:ResNet", IMAGE
    ),
    "B19-step-by-step": entry(
        "loop over time; reset inside forward; frozen thresholds", "braincog:ResNet", IMAGE, 3, False
    ),
    "B19-flattened": entry("steps become channels", "braincog:Flattened", IMAGE),
}
ZOO = {name: item for name, item in EVERY.items() if importlib.util.find_spec(item.needs)}
