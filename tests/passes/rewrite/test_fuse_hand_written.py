"""fuse-neurons: neurons as people write them, in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from snnpart.compilation import Options, compile_program
from snnpart.ops_fused import parts
from tests.passes.rewrite.test_fuse_neurons import compiled, fused_in
from tests.runtime.kernels.hand_written import (
    BEGINS,
    NEURONS,
    UNKNOWN,
    HandWritten,
    SamplesFirst,
    leaky,
    learned,
    networks,
    towards,
)


@pytest.mark.parametrize("name", networks())
def test_a_hand_written_neuron_is_fused_however_its_state_begins(name: str) -> None:
    """And, over all steps at once, with the norm before it. The gate compares it with the module."""
    torch.manual_seed(0)
    model = networks()[name]().double()
    x = 2 * torch.rand((4, 3, 5, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rate = float(model(x).detach().mean())
    assert 0.01 < rate < 0.99, rate
    program, _ = compile_program(model, x, Options(input_layout="TNCHW", fuse=True))
    (node,) = fused_in(program)
    assert parts(node.target.region).norm is not None  # type: ignore[union-attr]


def test_a_first_state_that_a_parameter_makes_is_named() -> None:
    name, begin = UNKNOWN
    program = compiled(HandWritten(NEURONS[name], BEGINS[begin]))
    assert fused_in(program) == []
    assert any("its first state is computed outside the loop" in notice for notice in program.notices)


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "microbatches": 2}])
def test_loops_over_samples_first_are_fused_as_they_lie(options: dict[str, Any]) -> None:
    """With norm and addition, and without turning anything round between the layers; the gate compares."""
    torch.manual_seed(0)
    blocks = (
        SamplesFirst(leaky, torch.zeros_like, residual=True),
        SamplesFirst(learned, lambda x: 0.0),
        SamplesFirst(towards, torch.zeros_like, norm=False),
    )
    model, x = nn.Sequential(*blocks).double(), 2 * torch.rand(4, 4, 5, 6, 6, dtype=torch.float64)
    inner = x
    for block in blocks:
        inner = block(inner)
        assert 0.01 < float((inner.detach() > 0.5).double().mean()) < 0.99
    program, _ = compile_program(model, x, Options(input_layout="TNCHW", fuse=True, **options))
    nodes = fused_in(program)
    assert len(nodes) == 3 * options.get("tp", 1)
    found = [parts(node.target.region) for node in nodes]  # type: ignore[union-attr]
    assert sum(part.norm is not None for part in found) == 2 * options.get("tp", 1)
    assert sum(part.residual is not None for part in found) == options.get("tp", 1)
    turns = [n for stage in program.stages.values() for n in stage.graph.nodes if n.target is torch.movedim]
    assert turns == []
