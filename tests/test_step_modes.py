"""A SpikingJelly network in single-step mode, called T times by `time_steps=T`, and in multi-step mode: one program."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import simulate
from snnpart.api import parallelize
from snnpart.frameworks import reset_state
from tests.calibrate import fire

pytestmark = pytest.mark.skipif(importlib.util.find_spec("spikingjelly") is None, reason="needs SpikingJelly")
T = 4


def plain(norm: bool) -> nn.Module:
    """Convolution, neuron, pooling, and a classifier, with or without BatchNorm; in single-step mode."""
    from spikingjelly.activation_based import layer, neuron, surrogate

    lif = lambda: neuron.LIFNode(tau=1.5, surrogate_function=surrogate.ATan(), detach_reset=True)
    norms = [layer.BatchNorm2d(6)] if norm else []
    return nn.Sequential(
        layer.Conv2d(2, 6, 3, padding=1), *norms, lif(), layer.MaxPool2d(2), layer.Conv2d(6, 6, 3), lif(),
        layer.Flatten(), layer.Linear(24, 5), lif(),
    )  # fmt: skip


def pair(norm: bool, training: bool, static: bool) -> tuple[nn.Module, nn.Module, Tensor]:
    """The network in step modes s and m, with equal weights, active, and its input of all steps or of one."""
    from spikingjelly.activation_based import functional

    torch.manual_seed(0)
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    frames = x.expand(T, *x.shape) if static else torch.randn(T, 3, 2, 8, 8, dtype=torch.float64)
    single = plain(norm).double().train()
    fire(single, lambda: torch.stack([single(frame) for frame in frames]))
    functional.reset_net(single)
    many = copy.deepcopy(single)
    functional.set_step_mode(many, "m")
    return single.train(training), (Repeats(many) if static else many).train(training), x if static else frames


class Repeats(nn.Module):
    """A multi-step network that is given one image."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unsqueeze(0).repeat(T, 1, 1, 1, 1))
        return out


def ran(model: nn.Module, x: Tensor, training: bool, **options: Any) -> simulate.SimulatedRun:
    program = parallelize(model, example_inputs=x, **options).compiled
    run = simulate.run(program, (x,), training=training)
    out = run.outputs[0]
    assert 0.01 < out.detach().mean() < 0.99
    (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape)).sum().backward()
    return run


@pytest.mark.parametrize("how", [{}, {"tp": 2}, {"pp": 2}], ids=["one", "tp", "pp"])
@pytest.mark.parametrize("static", [True, False], ids=["image", "frames"])
@pytest.mark.parametrize(("norm", "training"), [(False, True), (True, False)], ids=["train", "norm-eval"])
def test_step_modes_give_the_same_result(norm: bool, training: bool, static: bool, how: dict[str, int]) -> None:
    """With BatchNorm only in eval mode: its batch is one step in mode s and all of them in mode m."""
    single, many, x = pair(norm, training, static)
    layout = {"input_layout": "NCHW" if static else "TNCHW"}
    one = ran(single, x, training, time_steps=T, **layout, **how)
    other = ran(many, x, training, **({"out_dims": 1} if static else layout), **how)
    torch.testing.assert_close(one.outputs[0], other.outputs[0], rtol=0, atol=1e-9)
    gradients = {name.removeprefix("net."): grad for name, grad in other.gradients().items()}
    assert {name for name, grad in one.gradients().items() if grad is not None} == set(dict(single.named_parameters()))
    for name, grad in one.gradients().items():
        torch.testing.assert_close(grad, gradients[name], rtol=0, atol=1e-9)


def test_step_modes_differ_in_training_only_by_their_statistics() -> None:
    """Each mode equals its own eager network: T updates of the averages in mode s, one in mode m."""
    single, many, x = pair(norm=True, training=True, static=False)
    for model, options, updates in ((single, {"time_steps": T}, T), (many, {}, 1)):
        before = int(model.state_dict()["1.num_batches_tracked"])
        run = ran(model, x, True, input_layout="TNCHW", **options)
        assert int(run.buffers()["1.num_batches_tracked"]) == before + updates


def test_windows_in_other_step_modes_share_the_layers() -> None:
    """With T = 3 the neurons are called once over all steps, with T = 1 step by step: one copy of each serves both."""
    single, _, x = pair(norm=False, training=True, static=False)
    program = parallelize(single, example_inputs=x[:3], input_layout="TNCHW", time_steps=3)
    with program.launch() as running:  # type: ignore[union-attr]
        for steps in (3, 1, 3):
            with torch.no_grad():
                reset_state(single)
                single.eval()
                want = torch.stack([single(frame) for frame in x[:steps]])
                reset_state(single)
            torch.testing.assert_close(running.eval_step(x[:steps]), want, rtol=0, atol=1e-9)
