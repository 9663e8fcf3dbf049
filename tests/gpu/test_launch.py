"""One GPU: a network traced on the CPU trains on the GPU as the module itself does there, constants included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import parallelize
from snnpart.frameworks import reset_state
from tests.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NETWORKS = ("small_sew-m", "snntorch_leaky", "handwritten_lif", "unet", "recurrent", "spikformer", "qkformer")


def squared(output: Any, target: Tensor) -> Tensor:
    """A loss on every output, whatever their structure; the targets only have the batch."""
    leaves = pytree.tree_leaves(output)
    return torch.stack([(leaf + 0.1 * target.mean()).square().mean() for leaf in leaves]).sum()


def train_plain(module: nn.Module, name: str, inputs: tuple[Tensor, ...], target: Tensor, steps: int) -> list[float]:
    """`steps` updates of the module itself on the GPU."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        reset_state(module)
        optimizer.zero_grad()
        loss = squared(ZOO[name].call(module, inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def layouts(name: str) -> tuple[str, ...]:
    model = ZOO[name]
    letter = {model.in_dims: "N", model.time_dim: "T"}
    return tuple("".join(letter.get(dim, "C") for dim in range(len(shape))) for shape in model.shapes)


@pytest.mark.parametrize("kernels", [False, True], ids=["layers", "kernels"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_from_the_cpu_trains_on_the_gpu_as_the_module_does(name: str, kernels: bool) -> None:
    pytest.importorskip(ZOO[name].needs)
    module, inputs = ZOO[name].build()
    how: dict[str, Any] = {"input_layout": layouts(name), "time_steps": ZOO[name].steps, "verify": "trace"}
    program = parallelize(module, example_inputs=inputs, fuse=kernels, channels_last=kernels, **how)
    on_gpu = tuple(x.cuda() for x in inputs)
    reference = copy.deepcopy(module).cuda()
    target = torch.ones(inputs[0].shape[ZOO[name].in_dims], dtype=inputs[0].dtype, device="cuda")
    want = train_plain(reference, name, on_gpu, target, steps=3)
    running = program.launch(lambda params: torch.optim.SGD(params, lr=0.05), device="cuda")
    try:
        got = [float(running.train_step(on_gpu, target, squared)) for _ in range(3)]
        state = running.state_dict()
    finally:
        running.close()
    assert got == pytest.approx(want, rel=1e-9)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(state[key].cpu(), value.cpu(), rtol=1e-9, atol=1e-9)
