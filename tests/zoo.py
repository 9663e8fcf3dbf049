"""The model zoo: real networks of every framework, small, made active, with how they are called.

    model = ZOO["sew_resnet18-m"]
    module, inputs = model.build()         # the module fires, the inputs are a tuple of tensors
    trace(module, inputs, **model.dims)    # in_dims, time_dims, time_steps

`SMALL` names a covering subset that is quick enough for every run; the rest belongs to the long matrix (marker `all`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.frameworks import preserved, reset_state
from tests import zoo_models as models
from tests import zoo_spikingjelly as sj
from tests.calibrate import fire, rates, silent
from tests.margin import MARGIN, margin

STEPS = 3
_CALIBRATED: dict[Any, tuple[dict[str, Tensor], int]] = {}


@dataclass(frozen=True)
class Model:
    """One network and how it is called.

    `shapes` are the shapes of its inputs; `in_dims` and `time_dims` say where batch and time lie in them; `steps` is T
    for a module that computes one step a call. `dtype` is float64 where the network runs in it.
    """

    factory: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    in_dims: int = 0
    time_dim: int | None = None
    steps: int | None = None
    dtype: torch.dtype = torch.float64
    needs: str = "torch"
    slow: bool = False

    @property
    def dims(self) -> dict[str, Any]:
        """The keyword arguments of `trace` that say where batch and time are."""
        named = {"in_dims": self.in_dims, "time_dims": self.time_dim, "time_steps": self.steps}
        return {name: value for name, value in named.items() if value is not None}

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Example inputs, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in self.shapes
        )

    def call(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        """The reference: the module called once, or `steps` times with the outputs stacked over T at dim 0."""
        if self.steps is None:
            return module(*inputs)
        at = (lambda x, t: x) if self.time_dim is None else (lambda x, t: x.select(self.time_dim, t))
        return torch.stack([module(*(at(x, t) for x in inputs)) for t in range(self.steps)])

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The network in training mode, every neuron layer firing, its state reset, and example inputs."""
        key = (self, seed)  # the same network made to fire by other inputs, or over more steps, is another one
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory().to(self.dtype).train()
            if key in _CALIBRATED:
                module.load_state_dict(_CALIBRATED[key][0])
                return module, self.inputs(_CALIBRATED[key][1])
            fire(module, lambda: self.call(module, self.inputs(seed)))
            seed = self._clear_of_thresholds(module, seed)
        if not self.slow:
            _CALIBRATED[key] = ({name: value.clone() for name, value in module.state_dict().items()}, seed)
        return module, self.inputs(seed)

    def _clear_of_thresholds(self, module: nn.Module, seed: int) -> int:
        """In float32 the first seed whose inputs keep every membrane away from its threshold and all layers firing."""
        reset_state(module)
        if self.dtype != torch.float32:
            return seed
        for chosen in range(seed, seed + 400):
            call = partial(self.call, module, self.inputs(chosen))
            with preserved(module):
                clear = margin(call) > MARGIN
            with preserved(module):
                if clear and not silent(rates(module, call)):
                    return chosen
        raise AssertionError("no inputs keep all membranes away from their thresholds")


def _pair(name: str, factory: Callable[[str], nn.Module], image: tuple[int, ...], **options: Any) -> dict[str, Model]:
    """A SpikingJelly network in both step modes: `name-m` on [T, N, ...] and `name-s` called T times."""
    many, one = (STEPS, *image), image
    common = {"needs": "spikingjelly", **options}
    return {
        f"{name}-m": Model(lambda: factory("m"), (many,), in_dims=1, time_dim=0, **common),
        f"{name}-s": Model(lambda: factory("s"), (one,), steps=STEPS, **{**common, "slow": True}),
    }


IMAGE = (2, 3, 32, 32)
SEW = {
    key: value
    for depth in (18, 34, 50, 101, 152)
    for key, value in _pair(f"sew_resnet{depth}", sj.sew_resnet(depth), IMAGE, slow=depth > 18).items()
}
SPIKINGJELLY = {
    **SEW,
    **_pair("spiking_resnet18", sj.spiking_resnet18, IMAGE, slow=True),
    **_pair("spiking_vgg11_bn", sj.spiking_vgg11_bn, IMAGE),
    **_pair("plif_mnist", sj.plif_net("MNISTNet", 4), (2, 1, 28, 28)),
    **_pair("plif_cifar10", sj.plif_net("CIFAR10Net", 8), IMAGE, slow=True),
    **_pair("plif_dvs_gesture", sj.plif_net("DVSGestureNet", 4), (2, 2, 128, 128), slow=True),
    "small_sew-m": Model(sj.small_sew("m"), ((STEPS, 2, 3, 16, 16),), in_dims=1, time_dim=0, needs="spikingjelly"),
    "small_sew-s": Model(sj.small_sew("s"), ((2, 3, 16, 16),), steps=STEPS, needs="spikingjelly"),
    "small_sew-s-frames": Model(
        sj.small_sew("s"), ((2, STEPS, 3, 16, 16),), time_dim=1, steps=STEPS, needs="spikingjelly"
    ),
    "ms_resnet": Model(sj.ms_resnet, (IMAGE,), needs="spikingjelly"),
    "ms_resnet-frames": Model(sj.ms_resnet, ((2, *IMAGE),), in_dims=1, time_dim=0, needs="spikingjelly", slow=True),
    "max_resnet": Model(sj.max_resnet, (IMAGE,), needs="spikingjelly", slow=True),
    "spikformer": Model(sj.spikformer, (IMAGE,), needs="spikingjelly"),
    "qkformer": Model(sj.qkformer, (IMAGE,), needs="spikingjelly"),
    "maxformer": Model(sj.maxformer, (IMAGE,), needs="spikingjelly", slow=True),
    "spike_driven_transformer": Model(sj.spike_driven_transformer, (IMAGE,), needs="spikingjelly"),
    "dvs_ntchw": Model(sj.dvs_ntchw, ((2, STEPS, 2, 16, 16),), time_dim=1, needs="spikingjelly"),
}
SNNTORCH = {
    "snntorch_leaky": Model(models.leaky_loop, ((2, 1, 12, 12),), needs="snntorch"),
    "snntorch_leaky_float32": Model(
        models.leaky_loop_float32, ((2, 1, 12, 12),), dtype=torch.float32, needs="snntorch"
    ),
    "snntorch_synaptic": Model(models.synaptic_loop, ((2, 8),), needs="snntorch"),
    "snntorch_alpha": Model(models.alpha_loop, ((2, 8),), needs="snntorch"),
    "snntorch_rleaky": Model(models.rleaky_loop, ((2, 4, 8),), time_dim=1, needs="snntorch"),
    "snntorch_sconv2dlstm": Model(models.sconv2dlstm_loop, ((2, 1, 12, 12),), needs="snntorch"),
    "snntorch_hidden": Model(models.hidden_sequential, ((2, 1, 12, 12),), steps=STEPS, needs="snntorch"),
}
NORSE = {
    "norse_sequential": Model(models.norse_sequential, ((2, 1, 12, 12),), needs="norse"),
    "norse_lsnn": Model(models.norse_lsnn, ((4, 2, 6),), in_dims=1, time_dim=0, needs="norse"),
}
SINABS = {
    "sinabs_from_model": Model(
        models.sinabs_from_model, ((2, 4, 1, 8, 8),), time_dim=1, dtype=torch.float32, needs="sinabs"
    ),
    "sinabs_layers": Model(models.sinabs_layers, ((2, 4, 8),), time_dim=1, dtype=torch.float32, needs="sinabs"),
}
PLAIN = {
    "handwritten_lif": Model(models.HandWritten, ((2, 3, 8, 8),)),
    "unet": Model(models.UNet, ((2, 1, 16, 16),)),
    "recurrent": Model(models.Recurrent, ((2, 4, 6),), time_dim=1),
    "tied": Model(models.Tied, ((2, 4, 8),), time_dim=1),
}
ALL = {**SPIKINGJELLY, **SNNTORCH, **NORSE, **SINABS, **PLAIN}
ZOO = {name: model for name, model in ALL.items() if importlib.util.find_spec(model.needs)}
SMALL = [name for name, model in ZOO.items() if not model.slow]


def every() -> list[Any]:
    """The zoo's names as pytest parameters; the slow ones carry the marker `all`."""
    return [pytest.param(name, marks=[pytest.mark.all] if model.slow else []) for name, model in ZOO.items()]
