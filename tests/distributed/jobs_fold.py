"""What the ranks do in the test of numerics="fold": an evaluation after a train step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnpart.api import parallelize
from tests.distributed.jobs_rounding import batch, network


def evaluated(numerics: str, **topology: Any) -> tuple[Tensor, int]:
    """Outputs of an evaluation with the weights and statistics that a train step left, and how many norms are gone."""
    x, weights = batch()
    program = parallelize(network(), example_inputs=x, input_layout="TNCHW", numerics=numerics, **topology)
    running: Any = program.launch(lambda params: torch.optim.SGD(params, lr=0.02))
    with running:
        at, size = running.ranks.at.dp, running.ranks.mesh.dp
        own = [x.tensor_split(size, 1)[at], weights.tensor_split(size)[at]]
        running.train_step(*own, lambda out, w: (out.movedim(1, 0) * w).flatten(1).sum(1).mean())
        told = [text for text in program.compiled.notices if "norms are part of" in text]
        return running.eval_step(x), int(told[0].partition(" ")[0]) if told else 0
