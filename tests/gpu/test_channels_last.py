"""One GPU: in a spiking ResNet with fused neurons layouts change at the two ends only, in forward and in backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import parallelize
from snnpart.frameworks import reset_state
from snnpart.runtime.kernels import layout
from tests.layouts import LayoutChanges

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def sew(dtype: torch.dtype) -> nn.Module:
    """SEW-ResNet18 whose layers fire."""
    from spikingjelly.activation_based import functional, neuron, surrogate
    from spikingjelly.activation_based.model import sew_resnet

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    net = sew_resnet.sew_resnet18(
        spiking_neuron=neuron.LIFNode, cnf="ADD", surrogate_function=surrogate.ATan(), detach_reset=True, num_classes=10
    )
    functional.set_step_mode(net, "m")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 2.0)
    made: nn.Module = net.to("cuda", dtype)
    return made


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.mean(0), target)


def example(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.rand(4, 8, 3, size, size, device="cuda", dtype=dtype)
    return x, torch.randint(0, 10, (8,), device="cuda")


def test_layouts_change_at_the_ends_of_sew_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = example(64, torch.float32)
    program = parallelize(sew(torch.float32), example_inputs=x, input_layout="TNCHW", verify="off")
    running = program.launch(execution="eager")
    running.train_step(x, y, loss)  # compiles the kernels
    copies, copy = list[tuple[int, ...]](), layout.copy_laid

    def copy_laid(to: Tensor, source: Tensor) -> None:
        copies.append(tuple(to.shape))
        copy(to, source)

    monkeypatch.setattr(layout, "copy_laid", copy_laid)
    with LayoutChanges() as changes:
        running.train_step(x, y, loss)
    running.close()
    # the input on its way in, and the gradient on its way back into the last layer, which the mean over places spreads
    assert copies == [(32, 3, 64, 64), (32, 512, 2, 2)]
    assert changes.found == [], "no operation of torch changes a layout"


def test_sew_resnet_with_kernels_is_the_module() -> None:
    """In float64, where no spike flips."""
    net = sew(torch.float64)
    x, y = example(32, torch.float64)
    program = parallelize(net, example_inputs=x, input_layout="TNCHW", verify="off")
    running = program.launch(execution="eager")
    found = running.train_step(x, y, loss)
    gradients = running.gradients()
    running.close()
    net.train()
    reset_state(net)
    wanted = loss(net(x), y)
    wanted.backward()
    assert float(found) == pytest.approx(float(wanted), rel=1e-9)
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and gradients[name] is not None
        off = (gradients[name].cuda() - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-30)
        assert float(off) < 1e-9, name
