"""Neuron state in registered buffers, on ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from snnpart import parallelize
from tests.distributed.jobs import ramp
from tests.neurons import data, fill
from tests.trace.test_window_buffers import Net


def state_after_a_step(dp: int, **topology: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The full state after a step, and after loading that of a module which has run at another batch size."""
    running = parallelize(fill(Net(True)), example_inputs=data(4, 4), verify="off", **topology).launch()
    running.train_step(data(4 * dp, 4).tensor_split(dp)[running.ranks.at.dp], torch.zeros(4), ramp)
    stepped = running.state_dict()
    eager = fill(Net(True), k=0.5)
    eager(data(7, 4))
    running.load_state_dict(eager.state_dict())
    loaded = running.state_dict()
    running.close()
    return stepped, loaded
