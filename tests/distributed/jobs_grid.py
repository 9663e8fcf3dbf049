"""Two steps of networks of the grid on real ranks."""

from __future__ import annotations

from typing import Any

import torch

from snnpart.api import parallelize
from tests.distributed.grid_nets import build, inputs, options
from tests.distributed.jobs import ramp


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def run_all(jobs: list[tuple[str, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row of the grid after the other: network, samples and topology."""
    results = []
    for name, batch, topology in jobs:
        try:
            results.append(run(name, batch, **topology))
        except Exception as error:
            error.add_note(f"in {name}, {batch} samples, {topology}")
            raise
    return results


def run(name: str, batch: int, steps: int = 2, **topology: Any) -> dict[str, Any]:
    """Losses, the last step's gradients, and the state; dp rank r takes batches of seeds r, r + 10, ... ."""
    program = parallelize(build(name), example_inputs=inputs(name, batch, 0), **options(name), **topology)
    running = program.launch(optimizer=sgd)
    losses = [
        running.train_step(inputs(name, batch, running.ranks.at.dp + 10 * step), torch.zeros(batch), ramp).item()
        for step in range(steps)
    ]
    result = {"losses": losses, "gradients": running.gradients(), "state": running.state_dict()}
    running.close()
    return result
