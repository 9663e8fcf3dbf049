"""fuse-neurons: neurons as people write them, in plain loops."""

from __future__ import annotations

import pytest
import torch

from snnpart.compilation import Options, compile_program
from snnpart.ops_fused import parts
from tests.passes.rewrite.test_fuse_neurons import compiled, fused_in
from tests.runtime.kernels.hand_written import BEGINS, NEURONS, UNKNOWN, HandWritten, networks


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
