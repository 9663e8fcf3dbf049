"""Kernels whose states are rounded from step to step, beside their text in plain torch: a line of JSON a case.

Run as a program in Triton's interpreter, as `tests.runtime.kernels.fused` is.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from snnpart.graph import Body
from snnpart.ops_fused import FusedNeuron
from snnpart.runtime.kernels.fused_neuron import Fused
from tests.runtime.kernels.fused import Case, Kernels, both, cases, errors, example

CASES = ("PLIF", "Izhikevich", "still", "written", "sinabs LIF", "sinabs rows by samples")


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


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    known = cases()
    for name in filter(known.__contains__, CASES):  # float16: to bfloat16 the interpreter cuts off, a GPU rounds
        sys.stdout.write(json.dumps(report(name, known[name], "float16")) + "\n")
