"""Neurons of every framework with inputs they accept, for the adapter tests: name -> (factory, *inputs)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

Case = tuple[Callable[[], nn.Module], tuple[Any, ...]]


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _in_mode(kind: Any, mode: str, arguments: dict[str, Any]) -> nn.Module:
    made = kind(**arguments)
    made.step_mode = mode
    return cast(nn.Module, made)


def spikingjelly() -> dict[str, Case]:
    from spikingjelly.activation_based import neuron, surrogate

    names = ["IF", "LIF", "ParametricLIF", "QIF", "EIF", "Izhikevich", "LIAF", "KLIF", "ILIF", "SimpleIF"]
    names += ["HalfThresholdIF", "TernaryIF", "TernaryLIF", "ComplementaryLIF", "CUBALIF"]
    special: dict[str, dict[str, Any]] = {"LIAF": {"act": torch.relu, "threshold_related": True}}
    cases: dict[str, Case] = {}
    for name in names:
        if (kind := getattr(neuron, f"{name}Node", None)) is None:
            continue
        for mode, x in (("s", _x(2, 3, 4, 4)), ("m", _x(3, 2, 3, 4, 4))):
            cases[f"{name}Node-{mode}"] = (partial(_in_mode, kind, mode, special.get(name, {})), (x,))
    atan = surrogate.ATan()
    cases |= {
        "LIFNode-soft": (lambda: neuron.LIFNode(v_reset=None, detach_reset=True, surrogate_function=atan), (_x(2, 3),)),
        "LIFNode-v_seq": (lambda: neuron.LIFNode(store_v_seq=True, step_mode="m"), (_x(3, 2, 3),)),
    }
    if hasattr(neuron, "PSN"):
        cases |= {
            "PSN": (lambda: neuron.PSN(T=3), (_x(3, 2, 3),)),
            "MaskedPSN": (lambda: neuron.MaskedPSN(k=2, T=3, step_mode="m"), (_x(3, 2, 3),)),
            "SlidingPSN": (lambda: neuron.SlidingPSN(k=2, step_mode="m"), (_x(3, 2, 3),)),
        }
    else:
        # release 0.0.0.0.14, whose LIAFNode fails in its own forward
        cases = {name: case for name, case in cases.items() if not name.startswith("LIAF")}
    return cases


def snntorch() -> dict[str, Case]:
    import snntorch as snn
    from snntorch import surrogate

    x, image = _x(2, 5), _x(2, 3, 6, 6)
    return {
        "Leaky": (lambda: snn.Leaky(beta=0.9), (x, None)),
        "Leaky-mem": (lambda: snn.Leaky(beta=0.9, learn_beta=True), (x, torch.rand(2, 5))),
        "Leaky-hidden": (lambda: snn.Leaky(beta=0.9, init_hidden=True, spike_grad=surrogate.fast_sigmoid(25)), (x,)),
        "Leaky-output": (lambda: snn.Leaky(beta=0.9, init_hidden=True, output=True), (x,)),
        "Leaky-zero": (lambda: snn.Leaky(beta=0.9, reset_mechanism="zero", reset_delay=False), (x,)),
        "Leaky-vector": (lambda: snn.Leaky(beta=torch.rand(5), threshold=torch.rand(5), learn_threshold=True), (x,)),
        "Lapicque": (lambda: snn.Lapicque(beta=0.9), (x,)),
        "Synaptic": (lambda: snn.Synaptic(alpha=0.9, beta=0.8), (x,)),
        "Alpha": (lambda: snn.Alpha(alpha=0.9, beta=0.8), (x,)),
        "RLeaky": (lambda: snn.RLeaky(beta=0.9, linear_features=5), (x,)),
        "RLeaky-one": (lambda: snn.RLeaky(beta=0.9, all_to_all=False, V=0.3), (x,)),
        "RSynaptic": (lambda: snn.RSynaptic(alpha=0.9, beta=0.8, linear_features=5), (x,)),
        "SLSTM": (lambda: snn.SLSTM(5, 7), (x,)),
        "SConv2dLSTM": (lambda: snn.SConv2dLSTM(3, 4, 3), (image,)),
        "SConv2dLSTM-pool": (lambda: snn.SConv2dLSTM(3, 4, 3, max_pool=2), (image,)),
    }


def norse() -> dict[str, Case]:
    import norse.torch as norse

    cases: dict[str, Case] = {}
    for name in ("LIFCell", "LICell", "IAFCell", "LSNNCell", "LIFRefracCell", "LIFAdExCell", "LIFBoxCell", "LIFExCell"):
        cases[name] = (getattr(norse, name), (_x(2, 5),))
    for name in ("LIFRecurrentCell", "LSNNRecurrentCell", "LILinearCell", "LIFRefracRecurrentCell"):
        cases[name] = (partial(getattr(norse, name), 5, 7), (_x(2, 5),))
    for name in ("LIF", "LI", "IAF", "LSNN"):
        cases[name] = (getattr(norse, name), (_x(3, 2, 5),))
    for name in ("LIFRecurrent", "LSNNRecurrent"):
        cases[name] = (partial(getattr(norse, name), 5, 7), (_x(3, 2, 5),))
    cases["LIF-record"] = (lambda: norse.LIF(record_states=True), (_x(3, 2, 5),))
    return cases


def sinabs() -> dict[str, Case]:
    import sinabs.activation as activation
    import sinabs.layers as layers

    x = _x(2, 3, 5)
    return {
        "IAF": (layers.IAF, (x,)),
        "IAF-single": (lambda: layers.IAF(spike_fn=activation.SingleSpike), (x,)),
        "LIF": (lambda: layers.LIF(tau_mem=20.0, tau_syn=5.0), (x,)),
        "ALIF": (lambda: layers.ALIF(tau_mem=20.0, tau_adapt=10.0), (x,)),
        "ExpLeak": (lambda: layers.ExpLeak(tau_mem=20.0), (x,)),
        "LIFSqueeze": (lambda: layers.LIFSqueeze(tau_mem=20.0, batch_size=2), (_x(6, 5),)),
        "IAFSqueeze": (lambda: layers.IAFSqueeze(batch_size=2, min_v_mem=-1.0), (_x(6, 5),)),
        "LIFRecurrent": (lambda: layers.LIFRecurrent(tau_mem=20.0, rec_connect=nn.Linear(5, 5)), (x,)),
    }


FRAMEWORKS = {"spikingjelly": spikingjelly, "snntorch": snntorch, "norse": norse, "sinabs": sinabs}
INSTALLED = [name for name in FRAMEWORKS if importlib.util.find_spec(name)]


TRACED_THROUGH = (
    "snntorch-RLeaky", "snntorch-RSynaptic", "snntorch-SLSTM", "snntorch-SConv2dLSTM", "snntorch-SConv2dLSTM-pool",
)  # fmt: skip
"""Neurons that are no leaves: they hold a matrix."""


def every_case() -> dict[str, Case]:
    """All neurons of the frameworks that are installed, by `framework-class-variant`."""
    return {f"{name}-{case}": value for name in INSTALLED for case, value in FRAMEWORKS[name]().items()}
