"""What the ranks do in the test of `neuron_dtype=`: a train step whose membranes are rounded from step to step."""

from __future__ import annotations

from typing import Any

import torch
from spikingjelly.activation_based import layer, neuron, surrogate
from torch import Tensor, nn

from snnpart.api import parallelize

BATCH = 4


def network() -> nn.Module:
    """[T, N, 3, H, W]: two blocks of convolution, norm (in eval, so that dp ranks agree) and a neuron."""
    torch.manual_seed(0)
    made = nn.Sequential(
        layer.Conv2d(3, 6, 3, padding=1, step_mode="m"),
        layer.BatchNorm2d(6, step_mode="m"),
        neuron.LIFNode(step_mode="m", v_threshold=0.4, surrogate_function=surrogate.ATan()),
        layer.Conv2d(6, 4, 3, padding=1, step_mode="m"),
        layer.BatchNorm2d(4, step_mode="m"),
        neuron.ParametricLIFNode(step_mode="m", v_threshold=0.3, v_reset=None, surrogate_function=surrogate.ATan()),
    )
    with torch.no_grad():
        for conv in (made[0], made[3]):
            conv.weight.mul_(2.0)  # type: ignore[operator, union-attr]
            conv.bias.add_(0.3)  # type: ignore[operator, union-attr]
    return made.double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand((5, BATCH, 3, 4, 4), generator=generator, dtype=torch.float64) * 2
    return x, torch.rand((BATCH, 5, 4, 4, 4), generator=generator, dtype=torch.float64)


def stepped(neuron_dtype: str, **topology: Any) -> tuple[float, dict[str, Tensor], Tensor, list[str]]:
    """Loss and gradients of one step, the outputs before it, and what notices say of states."""
    x, weights = batch()
    program = parallelize(
        network(), example_inputs=x, input_layout="TNCHW", fuse=True, neuron_dtype=neuron_dtype, **topology
    )
    running: Any = program.launch()
    with running:
        at, size = running.ranks.at.dp, running.ranks.mesh.dp
        own = [x.tensor_split(size, 1)[at], weights.tensor_split(size)[at]]
        outputs = running.eval_step(own[0])
        running.eval()
        loss = running.train_step(*own, lambda out, w: (out.movedim(1, 0) * w).flatten(1).sum(1).mean())
        return (
            float(loss),
            running.gradients(),
            outputs,
            [text for text in program.compiled.notices if "states" in text],
        )
