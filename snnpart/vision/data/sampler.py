"""Which samples a data-parallel rank takes at each step, and where an interrupted epoch goes on.

The order of an epoch is one permutation, made from the seed and the epoch alone. A step takes the next
batch_size * dp samples of it, and rank r the r-th part: another number of ranks with the same number of samples a step
sees the same batches, and the position in the epoch is a number of samples that means the same on any topology.

Nothing is padded. A last step shorter than the number of ranks is left out in training; in evaluation a rank without a
sample runs one that is not counted (`real` = 0), because the step is collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Share:
    """This rank's samples of one step: their indices, how many of them count, and those of all ranks together."""

    indices: tuple[int, ...]
    real: int
    together: int


@dataclass(frozen=True)
class Shares:
    """The steps of one pass over `length` samples, as rank `rank` of `dp` sees them.

    Args:
        length: number of samples.
        batch: samples a step of each rank.
        order: the seed and the epoch of the permutation; None: in order.
        position: samples of this pass that were seen before.
        smallest: in training: the fewest samples a rank can run; a shorter last step is left out. 0: evaluation.
    """

    length: int
    batch: int
    dp: int = 1
    rank: int = 0
    order: tuple[int, int] | None = None
    position: int = 0
    smallest: int = 0

    def __iter__(self) -> Iterator[Share]:
        rest = self._permutation()[self.position :]
        for step in rest.split(self.batch * self.dp):
            mine = step.tensor_split(self.dp)[self.rank]
            if self.smallest and len(step) // self.dp < self.smallest:
                return
            real = len(mine)
            yield Share(tuple((mine if real else step[:1]).tolist()), real, len(step))

    def __len__(self) -> int:
        whole, rest = divmod(self.length - self.position, self.batch * self.dp)
        counted = rest // self.dp >= self.smallest if self.smallest else True
        return whole + bool(rest and counted)

    @property
    def taken(self) -> int:
        """Samples that all ranks together take in what is left of the pass."""
        return min(len(self) * self.batch * self.dp, self.length - self.position)

    def _permutation(self) -> torch.Tensor:
        if self.order is None:
            return torch.arange(self.length)
        seed, epoch = self.order
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.length, generator=generator)
