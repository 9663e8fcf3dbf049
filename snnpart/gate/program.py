"""Run the lowered program, all its ranks, in this process, and keep what it computed as an observation.

Gradients and buffers come back under the user's names, put together from the ranks' slices. State that leaves keep on
themselves is not compared: it is reset for every batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart import simulate
from snnpart.gate.observe import Observed, cotangent, same_random_numbers
from snnpart.program import CompiledProgram


def observe_program(compiled: CompiledProgram, inputs: Any, want: Observed) -> Observed:
    """What the program computes for `inputs`, for the gradients and buffers that are in `want`."""
    source = compiled.source
    tensors = [x.detach().clone() for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    with same_random_numbers(inputs):
        run = simulate.run(compiled, tensors, training=source.traced_training, microbatches=1)
        roots = [output for output in run.outputs if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, [cotangent(root, at) for at, root in enumerate(roots)])
    gradients, buffers = run.gradients(), run.buffers()
    return Observed(
        outputs=[output.detach() for output in run.outputs],
        gradients={name: gradients.get(name) for name in want.gradients},
        buffers={name: buffers[name] for name in want.buffers},
    )
