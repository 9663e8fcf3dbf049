"""BatchNorm by kernels beside `ops.batch_norm`. Run as a program it compares them in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snnpart import ops
from snnpart.runtime.kernels import batch_norm as kernels

SHAPES = ((6, 24, 8, 8), (3, 5, 7, 7), (4, 48, 16), (64, 70), (2, 3, 4, 4, 4), (1, 3, 5, 5), (4, 192, 3, 2))


@dataclass(frozen=True)
class Case:
    """One norm: x [N, C, ...] with its channels last, how often it is repeated, with or without weight and bias, with
    or without running statistics; `columns`: all of them are columns of other tensors."""

    shape: tuple[int, ...]
    copies: int = 1
    affine: bool = True
    tracks: bool = True
    columns: bool = False

    @property
    def by_torch(self) -> bool:
        """Whether it is left to torch: kernels write running statistics that are whole in memory."""
        return self.columns and self.tracks

    def x(self, dtype: torch.dtype, device: str) -> Tensor:
        """Far from zero, where a sum of squares would lose digits."""
        generator = torch.Generator().manual_seed(0)
        made = torch.randn((self.shape[0], *self.shape[2:], self.shape[1]), generator=generator, dtype=torch.float64)
        return (3 * made + 10).to(dtype).to(device).movedim(-1, 1)

    def wanted(self, x: Tensor) -> dict[str, Tensor]:
        """What torch gives in float64 for the numbers of x; its own gradient on a CPU is wrong for a weight that is a
        column (2.14)."""
        return replace(self, columns=False).run(
            ops.batch_norm if self.copies == 1 else ops.batch_norm_copies, x.double(), x.dtype
        )

    def _gradient(self, x: Tensor, rounded: torch.dtype) -> Tensor:
        """The result's gradient: neither its sums nor those of its products with x cancel."""
        noise = torch.rand(
            self.shape, generator=torch.Generator(x.device).manual_seed(1), dtype=torch.float64, device=x.device
        )
        return (noise + x.double() / 10).to(rounded)

    def run(self, norm: Any, x: Tensor, rounded: torch.dtype | None = None) -> dict[str, Tensor]:
        """Result, gradients, running statistics and the counter; `rounded`: the dtype of the result's gradient."""
        channels, kept = self.shape[1], torch.float64 if x.dtype is torch.float64 else torch.float32
        own = x.detach().clone().requires_grad_()
        line = {"dtype": kept, "device": x.device}
        learned = [self._put(torch.linspace(low, 1.5, channels, **line)).requires_grad_() for low in (0.5, -1.0)]  # type: ignore[arg-type]
        running = [self._put(torch.full((channels,), value, **line)) for value in (0.0, 1.0)]  # type: ignore[arg-type]
        running.append(torch.tensor(0, device=x.device))
        given = (*(learned if self.affine else (None, None)), *(running if self.tracks else (None,) * 3))
        y = norm(own, *given, True, 0.1, 1e-5, *(() if self.copies == 1 else (self.copies,)))
        dy = self._gradient(x, rounded or x.dtype).to(y)
        wanted = [own, *(learned if self.affine else ())]
        found = dict(zip(("dx", "dw", "db"), torch.autograd.grad(y, wanted, dy), strict=False))
        seen = dict(zip(("mean", "var", "counter"), running if self.tracks else (), strict=False))
        return {"y": y.detach(), **found, **seen}

    def _put(self, numbers: Tensor) -> Tensor:
        return torch.stack((numbers, -numbers), dim=1)[:, 0] if self.columns else numbers


HOW = ((1,), (3,), (1, False), (1, True, False), (1, True, False, True), (1, False, True, True))
CASES = tuple(Case(shape, *how) for shape, how in itertools.product(SHAPES, HOW))


def errors(case: Case, x: Tensor) -> dict[str, float]:
    """The largest difference of each value from torch's in float64, relative to its largest number."""
    wanted, found = case.wanted(x), case.run(kernels.batch_norm, x)
    assert found.keys() == wanted.keys() and (case.by_torch or found["y"].stride() == x.stride())
    return {
        name: float((found[name].double() - value.double()).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in wanted.items()
    }


def found() -> Iterator[dict[str, Any]]:
    kernels.LEAST = 0
    for case in CASES:
        x = case.x(torch.float64, "cpu")
        yield {"case": str(case), "takes": kernels.takes(x, 0.1), **errors(case, x)}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    for line in found():
        print(json.dumps(line))
    sys.exit(0)
