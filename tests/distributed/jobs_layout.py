"""What the ranks do in the tests of layouts: a train step, an evaluation, and the state, with channels last."""

from __future__ import annotations

from typing import Any

import torch

from snnpart.api import parallelize
from tests.distributed.layout_nets import images, loss_fn, made


def one_step(name: str, **options: Any) -> dict[str, Any]:
    """Gradients and state of a launched program of the network."""
    x = images()
    running: Any = parallelize(made(name), example_inputs=x, channels_last=True, **options).launch()
    state = running.state_dict()
    loss = float(running.train_step(x, torch.zeros(len(x)), loss_fn))
    found = {"loss": loss, "gradients": running.gradients(), "state": state, "outputs": running.eval_step(x)}
    running.close()
    return found
