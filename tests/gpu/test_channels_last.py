"""One GPU: in a spiking ResNet with fused neurons layouts change at the two ends only, in forward and in backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from snnpart import parallelize
from snnpart.frameworks import reset_state
from tests.layouts import LayoutChanges

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_layouts_change_at_the_ends_of_sew_resnet() -> None:
    from spikingjelly.activation_based import functional, neuron, surrogate
    from spikingjelly.activation_based.model import sew_resnet

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    net = sew_resnet.sew_resnet18(
        spiking_neuron=neuron.LIFNode, cnf="ADD", surrogate_function=surrogate.ATan(), detach_reset=True, num_classes=10
    )
    functional.set_step_mode(net, "m")
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.constant_(module.weight, 2.0)
    net = net.cuda()
    x, y = torch.rand(4, 8, 3, 64, 64, device="cuda"), torch.randint(0, 10, (8,), device="cuda")

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.mean(0), target)

    program = parallelize(net, example_inputs=x, input_layout="TNCHW", verify="off")
    running = program.launch(execution="eager")
    running.train_step(x, y, loss)  # compiles
    running.zero_grad()
    with LayoutChanges() as changes:
        found = running.train_step(x, y, loss)
    gradients = running.gradients()
    running.close()
    # the input on its way in, and the gradient on its way back into the last layer, which the mean over places spreads
    assert changes.found == ["aten.clone.default (32, 3, 64, 64)", "aten.copy_.default (32, 512, 2, 2)"]
    net.train()
    reset_state(net)
    for _ in range(2):
        reset_state(net)
        wanted = loss(net(x), y)
    wanted.backward()
    assert float(found) == pytest.approx(float(wanted), rel=1e-3)
    weight = "layer1.0.conv1.module.weight" if "layer1.0.conv1.module.weight" in gradients else "layer1.0.conv1.weight"
    grad = dict(net.named_parameters())[weight].grad
    assert grad is not None
    assert float((gradients[weight].cuda() - grad).norm() / grad.norm()) < 0.02
