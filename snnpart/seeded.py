"""A block with random numbers of its own, which leaves every generator as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@contextmanager
def seeded(seed: int, inputs: Any) -> Iterator[None]:
    """Draw from this seed inside the block, on the CPU and on the GPUs of the (nested) inputs.

    Not by `torch.manual_seed`: it would seed all other GPUs too, which nothing puts back.
    """
    devices = sorted({x.device.index for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.is_cuda})
    with torch.random.fork_rng(devices):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
            generator.manual_seed(seed)
        yield
