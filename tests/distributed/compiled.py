"""Cases compiled for a topology, as `parallelize` does it."""

from __future__ import annotations

from typing import Any

from snnpart.api import parallelize
from snnpart.program import CompiledProgram
from tests.distributed.cases import Case


def compile_case(case: Case, **topology: Any) -> CompiledProgram:
    """The case's network for the topology, compiled for its first batch, without the gate."""
    inputs, _ = case.batches()[0]
    options = {"verify": "off", **case.options, **topology}
    return parallelize(case.model(), example_inputs=inputs, **options).compiled
