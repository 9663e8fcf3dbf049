"""Neurons whose steps have operations that Triton has no word for, or share tensors: a line of JSON a case.

Run as a program (`python -m tests.runtime.kernels.expressions short`, or `long`) in Triton's interpreter, as
`tests.runtime.kernels.fused` is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.kernels.fused import Block, Case, Steps, report


class Recurrent(Steps):
    """A layer whose weight has two names."""

    def forward(self, x: Tensor) -> Tensor:
        spikes, membrane, made = None, None, []
        for now in x:
            spikes, membrane = self.step(self.conv(now), spikes, membrane)
            made.append(spikes)
        return torch.stack(made)  # type: ignore[arg-type]


class Curved(nn.Module):
    """A membrane without spikes through every one of these operations."""

    def forward(self, x: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        v = x if v is None else torch.atan(3.0 * v) * 0.5 + x
        y = torch.erfc(1.0 - v) * F.leaky_relu(v - 1.0, 0.2) + (v.abs() + 0.1) ** 1.5 - (v.abs() + 1.0) ** -3.3
        return y, v - 0.1 * y


def cases() -> dict[str, Case]:
    """All cases by name."""
    import snntorch as snn
    from spikingjelly.activation_based import neuron, surrogate

    kinds = {
        "QPseudoSpike, 3.3": surrogate.QPseudoSpike(alpha=3.3),
        "QPseudoSpike, 12": surrogate.QPseudoSpike(alpha=12.0),
        "ATan without spikes": surrogate.ATan(spiking=False),
        "Erf without spikes": surrogate.Erf(spiking=False),
        "LogTailedReLU without spikes": surrogate.LogTailedReLU(alpha=0.5, spiking=False),
    }
    found = {"curved": Case(lambda: Steps(Curved()))}
    found["two names"] = Case(lambda: Recurrent(snn.RLeaky(beta=0.9, all_to_all=False)), dtype=torch.float32)
    found |= {name: Case(lambda kind=kind: Block(_lif(neuron, kind), residual=False)) for name, kind in kinds.items()}
    if importlib.util.find_spec("norse"):
        import norse.torch as norse

        given = {"method": "circ", "alpha": torch.tensor(10.0), "tau_mem_inv": torch.tensor(600.0)}
        found["Norse, circ"] = Case(
            lambda: Steps(norse.LIFBoxCell(norse.LIFBoxParameters(**given))), dtype=torch.float32
        )
    return found


def _lif(neuron: object, kind: nn.Module) -> nn.Module:
    made: nn.Module = neuron.LIFNode(surrogate_function=kind, step_mode="m")  # type: ignore[attr-defined]
    return made


SHORT = ("curved", "two names")

if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    for name, case in cases().items():
        if (name in SHORT) is (sys.argv[1] == "short"):
            sys.stdout.write(json.dumps(report(name, case, channels_last=len(name) % 2 == 0)) + "\n")
