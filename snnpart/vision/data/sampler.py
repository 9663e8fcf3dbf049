"""Which samples a data-parallel rank takes at each step, and where an interrupted epoch goes on.

The order of an epoch is one permutation, made from the seed and the epoch alone. A step takes the next
batch_size * dp samples of it, and rank r the r-th part: another number of ranks with the same number of samples a step
sees the same batches, and the position in the epoch is a number of samples that means the same on any topology.

Nothing is padded. A last step shorter than the number of ranks is left out in training; in evaluation a rank without a
sample runs one that is not counted (`real` = 0), because the step is collective.

Frames of several T: a step takes samples of one T. The order is then one of runs of one T, of at most `RUN` samples in
training so that the T of steps change often, and a step ends where its run does; what is left out is left out of each
run. The runs depend on seed and epoch alone too, so that a position means the same on any topology here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 512


@dataclass(frozen=True)
class Share:
    """This rank's samples of one step: their indices, how many of them count, and those of all ranks together.
    `skipped`: samples before the step that are left out because they are fewer than the ranks."""

    indices: tuple[int, ...]
    real: int
    together: int
    skipped: int = 0


@dataclass(frozen=True)
class Shares:
    """The steps of one pass over `length` samples, as rank `rank` of `dp` sees them.

    Args:
        length: number of samples.
        batch: samples a step of each rank.
        order: the seed and the epoch of the permutation; None: in order.
        position: samples of this pass that were seen before.
        smallest: in training: the fewest samples a rank can run; a shorter last step is left out. 0: evaluation.
        lengths: T of every sample, where they differ.
    """

    length: int
    batch: int
    dp: int = 1
    rank: int = 0
    order: tuple[int, int] | None = None
    position: int = 0
    smallest: int = 0
    lengths: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Share]:
        for skipped, step in self._steps():
            mine = step.tensor_split(self.dp)[self.rank]
            real = len(mine)
            yield Share(tuple((mine if real else step[:1]).tolist()), real, len(step), skipped)

    def __len__(self) -> int:
        return sum(1 for _ in self._steps())

    @property
    def taken(self) -> int:
        """Samples that all ranks together take in what is left of the pass."""
        return sum(len(step) for _, step in self._steps())

    def _steps(self) -> Iterator[tuple[int, Tensor]]:
        """The samples of each step, and how many were left out before it."""
        begun = skipped = 0
        for run in self._runs():
            rest = run[max(0, self.position - begun) :]
            begun += len(run)
            for step in rest.split(self.batch * self.dp) if len(rest) else ():
                if len(step) // self.dp < self.smallest:
                    skipped += len(step)
                    continue
                yield skipped, step
                skipped = 0

    def _runs(self) -> Sequence[Tensor]:
        """The order of the pass, in runs of one T."""
        generator = self._generator()
        order = torch.arange(self.length) if generator is None else torch.randperm(self.length, generator=generator)
        if self.lengths is None:
            return (order,)
        lengths = torch.tensor(self.lengths)[order]
        of_one = [order[lengths == length] for length in lengths.unique()]
        if generator is None:
            return of_one
        runs = [run for samples in of_one for run in samples.split(RUN)]
        return [runs[number] for number in torch.randperm(len(runs), generator=generator)]

    def _generator(self) -> torch.Generator | None:
        if self.order is None:
            return None
        seed, epoch = self.order
        return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
