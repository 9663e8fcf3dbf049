"""Kernels whose states are rounded from step to step, beside their text in plain torch: a line of JSON a case.

Run as a program in Triton's interpreter, as `tests.runtime.kernels.fused` is.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from snnpart.graph import Body
from snnpart.ops_fused import FusedNeuron
from snnpart.runtime.kernels import fused_neuron
from snnpart.runtime.kernels.fused_neuron import Fused
from tests.runtime.kernels.fused import Case, Kernels, both, cases, errors, example

CASES = ("PLIF", "Izhikevich", "still", "written", "sinabs LIF", "sinabs rows by samples")
KEPT = (("written, long", "float16"), ("written, long", "bfloat16"), ("still, long", "float16"))
"""Of several chunks."""


class Rounded(Body):
    """Runs fused neurons' text in plain torch."""

    def bound(self, target: Any) -> Any:
        bound = super().bound(target)
        return Fused(target, self, bound)._rounded if isinstance(target, FusedNeuron) else bound


def report(name: str, case: Case, state: str) -> dict[str, Any]:
    """The differences of kernels from the text, and whether the text's output or gradients are others unrounded."""
    x = example(case)
    wanted, found, _ = both(case, x, dtype=case.dtype, kinds=(Rounded, Kernels), neuron_dtype=state)
    plain, _, _ = both(case, x, dtype=case.dtype, kinds=(Body, Body))
    moved = max(errors(plain, wanted).values())
    return {
        "case": name,
        "state": state,
        "errors": errors(wanted, found),
        "moved": moved,
        "rate": float(
            (wanted[0] - (x if getattr(case.make(), "residual", False) else 0)).abs().gt(0.5).double().mean()
        ),
    }


class Wide(Kernels):
    """Keeps rounded states for backward as they are computed."""

    def bound(self, target: Any) -> Any:
        bound = super().bound(target)
        return partial(self._wide, bound) if isinstance(target, FusedNeuron) else bound

    def _wide(self, bound: Any, *args: Any) -> Any:
        with mock.patch.dict(fused_neuron._KEPT, clear=True):
            return bound(*args)


def kept(name: str, case: Case, state: str) -> dict[str, Any]:
    """Whether kernels that keep states in their dtype give the same bits as with all of float64, and what they keep."""
    x, dtypes = example(case), set()

    def pack(saved: Tensor) -> Tensor:
        dtypes.add(str(saved.dtype))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        wanted, found, _ = both(case, x, dtype=case.dtype, kinds=(Wide, Kernels), neuron_dtype=state)
    pairs = [(wanted[0], found[0]), *((wanted[1][key], found[1][key]) for key in wanted[1])]
    same = all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    return {"case": name, "state": state, "same": same, "dtypes": sorted(dtypes)}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    known = cases()
    if sys.argv[1:] == ["kept"]:
        for name, dtype in KEPT:
            sys.stdout.write(json.dumps(kept(name, known[name], dtype)) + "\n")
        sys.exit()
    for name in filter(known.__contains__, CASES):  # float16: to bfloat16 the interpreter cuts off, a GPU rounds
        sys.stdout.write(json.dumps(report(name, known[name], "float16")) + "\n")
