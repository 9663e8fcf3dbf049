"""Bits of several ranks' pieces put into one value. Run as a program it does so in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from snnpart.runtime.kernels import bits

BEHIND = 4096
"""Numbers behind the value that nothing may write to."""
MARK = 7


@dataclass(frozen=True)
class Gathered:
    """Pieces [outer, size, inner], one of each rank, whose planes are all as long as those of the largest."""

    outer: int
    sizes: tuple[int, ...]
    inner: int
    states: tuple[int, int] = (0, 2)

    def wrong(self, dtype: torch.dtype, device: str) -> list[str]:
        """What is not as it must be after all pieces are put into their places, last one first."""
        low, count = self.states
        generator = torch.Generator().manual_seed(0)
        shape = (self.outer, sum(self.sizes), self.inner)
        wanted = torch.randint(low, low + count, shape, generator=generator).to(dtype).to(device)
        memory = torch.full((wanted.numel() + BEHIND,), MARK, dtype=dtype, device=device)
        whole = memory[: wanted.numel()].view(shape)
        places = list(itertools.accumulate(self.sizes, initial=0))
        for first, size in reversed(list(zip(places, self.sizes, strict=False))):
            planes = self._sent(wanted[:, first : first + size])
            bits.unpack_into(planes, whole[:, first : first + size], self.states)
        checks = {"inside": torch.equal(whole, wanted), "behind": bool((memory[wanted.numel() :] == MARK).all())}
        return [name for name, right in checks.items() if not right]

    def _sent(self, piece: Tensor) -> Tensor:
        padded = piece.new_full((self.outer * max(self.sizes) * self.inner,), self.states[0])
        padded[: piece.numel()] = piece.reshape(-1)
        return bits.pack(padded, self.states)


CASES = (
    Gathered(8, (5, 4), 64),
    Gathered(64, (24, 16), 1),
    Gathered(8, (4, 4), 64),
    Gathered(8, (5, 4), 63),
    Gathered(300, (22, 21, 21), 8, (-1, 3)),
    Gathered(3, (1, 8, 2), 16, (0, 6)),
    Gathered(64, (24,), 1, (0, 200)),
)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    for case in CASES:
        print(json.dumps({"case": str(case), "wrong": case.wrong(torch.float32, "cpu")}))
    sys.exit(0)
