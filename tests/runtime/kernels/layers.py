"""Networks and cases of layers that take all steps in one call, for `fused`: samples first, several results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.kernels.fused import Block, Case, Steps


class Rows(Block):
    """A block whose neuron takes steps and samples merged, [N*T, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.neuron(self.norm(self.conv(x.flatten(0, 1))))
        return y.unflatten(0, x.shape[:2]) + x if self.residual else y.unflatten(0, x.shape[:2])


class First(Block):
    """A block that takes the first of its neuron's results."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.neuron(self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2]))[0]
        return y + x if self.residual else y


class Stacked(Block):
    """A block whose neuron gives each step's result by itself."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.neuron(self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2]))
        return torch.stack(made) + x if self.residual else torch.stack(made)


def _multi_step(kind: Callable[..., nn.Module], given: Mapping[str, Any]) -> nn.Module:
    made = kind(**given)
    made.step_mode = "m"
    return made


def spikingjelly_neurons() -> dict[str, Callable[[], nn.Module]]:
    from spikingjelly.activation_based import neuron, surrogate

    def made(kind: str, **given: Any) -> Callable[[], nn.Module]:
        return partial(_multi_step, getattr(neuron, f"{kind}Node"), given)

    found = {
        "IF": made("IF"),
        "LIF": made("LIF"),
        "LIF-detached": made("LIF", detach_reset=True, surrogate_function=surrogate.ATan()),
        "LIF-soft": made("LIF", v_reset=None, tau=1.5, decay_input=False),
        "PLIF": made("ParametricLIF"),
        "QIF": made("QIF"),
        "EIF": made("EIF"),
        "Izhikevich": made("Izhikevich"),
        "KLIF": made("KLIF"),
    }
    found |= {
        name: made(name) for name in ("ILIF", "TernaryIF", "TernaryLIF", "CUBALIF") if hasattr(neuron, f"{name}Node")
    }
    return found


def spikingjelly_cases() -> dict[str, Case]:
    from spikingjelly.activation_based import neuron

    return {"non-spiking": Case(lambda: Stacked(neuron.NonSpikingLIFNode(tau=1.5)))}


def norse_cases() -> dict[str, Case]:
    import norse.torch as norse

    fast = norse.LIFParameters(tau_mem_inv=torch.tensor(600.0))
    cells = {"LIF": norse.LIFCell(fast), **{name: getattr(norse, f"{name}Cell")() for name in ("IAF", "LIFRefrac")}}
    layers = {"LIF": norse.LIF(fast), **{name: getattr(norse, name)() for name in ("LI", "IAF", "LIFAdEx", "LIFEx")}}
    cells["circ"] = norse.LIFCell(norse.LIFParameters(tau_mem_inv=torch.tensor(600.0), method="circ"))
    layers["LSNN"] = norse.LSNN(norse.LSNNParameters(v_th=torch.tensor(0.2)))
    return {
        **{f"Norse {name}": Case(partial(Steps, cell), dtype=torch.float32) for name, cell in cells.items()},
        **{f"Norse layer {name}": Case(partial(First, one), dtype=torch.float32) for name, one in layers.items()},
    }


def sinabs_cases() -> dict[str, Case]:
    """Samples first. Every surrogate, function that spikes, and reset is there once at least."""
    import sinabs.activation as activation
    from sinabs import layers

    def lif(**given: Any) -> Callable[[], nn.Module]:
        return lambda: Block(layers.LIF(**{"tau_mem": 3.0, "norm_input": False, **given}))

    single, wide = activation.SingleSpike, activation.SingleExponential(grad_width=2.0)
    made: dict[str, Callable[[], nn.Module]] = {
        "LIF": lif(),
        "IAF": lambda: Block(layers.IAF(spike_fn=single, reset_fn=activation.MembraneReset())),
        "ALIF": lambda: Block(layers.ALIF(tau_mem=3.0, tau_adapt=5.0, norm_input=False)),
        "ALIF, synapse": lambda: Block(layers.ALIF(tau_mem=3.0, tau_adapt=5.0, tau_syn=2.0, norm_input=False)),
        "ExpLeak": lambda: Block(layers.ExpLeak(tau_mem=3.0)),
        "synapse": lif(tau_syn=2.0, min_v_mem=-0.2, surrogate_grad_fn=activation.Gaussian()),
        "alphas": lif(train_alphas=True, norm_input=True, spike_threshold=torch.tensor(0.5)),
        "most spikes": lif(spike_fn=activation.MaxSpike(2), surrogate_grad_fn=activation.MultiGaussian()),
        "periodic": lif(surrogate_grad_fn=activation.PeriodicExponential(), min_v_mem=-1.0),
        "heaviside": lif(surrogate_grad_fn=activation.Heaviside(), reset_fn=activation.MembraneSubtract(0.8)),
        "reset to": lif(spike_fn=single, reset_fn=activation.MembraneReset(0.1), surrogate_grad_fn=wide),
        "rows by samples": lambda: Rows(layers.IAFSqueeze(batch_size=2)),
        "rows by steps": lambda: Rows(layers.LIFSqueeze(tau_mem=3.0, num_timesteps=4)),
        "no norm": lambda: Block(layers.IAF(), norm=False, residual=False),
    }
    found = {f"sinabs {name}": Case(one, dtype=torch.float32, layout="NTCHW") for name, one in made.items()}
    return found | {"sinabs long": replace(found["sinabs LIF"], steps=18)}
