"""The least time that a train step's work takes: what is counted, and in which words.

Each task of each operation takes the larger of its flops over the machine's rate of matrix products and its bytes over
the copy bandwidth. Bytes are those that must move even if every task were one perfect kernel: each operand read once,
each result written once, at the dtypes that autocast gives them. What an implementation does beyond that (a second
read of x for BatchNorm's sums, layout changes, casts of activations, sums of gradients where a value has two readers,
launches, waiting for messages) is what stands between a step and this line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Task = Literal[
    "convolution", "convolution dgrad", "convolution wgrad", "product", "product gradients", "neuron",
    "neuron backward", "norm", "norm backward", "pool", "pool backward", "rest", "rest backward", "weight casts",
    "optimizer",
]  # fmt: skip
"""A part of a step's work. "neuron" is a neuron's steps with the norm before and the addition behind it, where they are
fused; "rest" every other operation."""
TASKS: tuple[Task, ...] = get_args(Task)


@dataclass(frozen=True, slots=True)
class Work:
    """What one task of one operation needs: flops, bytes moved, and the microseconds that these take at the least."""

    task: Task
    module: str
    flops: float
    moved: float
    us: float


def total(works: Iterable[Work], *tasks: Task) -> float:
    """Microseconds of these tasks, one after the other; of all of them when none is named."""
    return sum(work.us for work in works if not tasks or work.task in tasks)
