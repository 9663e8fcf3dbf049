"""A folded loop draws its masks at once; module and program are then compared without draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import parallelize
from snnpart.errors import VerifyError
from snnpart.gate import check_program
from snnpart.gate.draws import WithoutDraws, draws_otherwise
from tests.neurons import SoftLIF


class Dropped(nn.Module):
    """Two dropouts a step: the loop draws their masks in turn, the folded program one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.lif = nn.Linear(4, 8), nn.Linear(8, 6), SoftLIF(threshold=0.2)

    def forward(self, x: Tensor) -> Tensor:
        out = [
            self.b(F.dropout(self.lif(F.dropout(self.a(x), 0.2, self.training)), 0.5, self.training)) for _ in range(4)
        ]
        return torch.stack(out).mean(0)


@pytest.mark.parametrize("tp", [1, 2])
def test_dropouts_in_a_loop_pass_the_gate(tp: int) -> None:
    torch.manual_seed(0)
    net = Dropped().double()
    program = parallelize(net, tp=tp, example_inputs=torch.randn(5, 4, dtype=torch.float64))
    assert draws_otherwise(program.compiled.source)
    assert program._gate is not None and program._gate.program is not None


def test_a_network_that_is_not_folded_is_compared_with_its_own_draws() -> None:
    torch.manual_seed(0)
    program = parallelize(Dropped().double(), fold=False, example_inputs=torch.randn(5, 4, dtype=torch.float64))
    assert not draws_otherwise(program.compiled.source)


def test_a_wrong_program_with_moved_draws_is_refused() -> None:
    torch.manual_seed(0)
    net, x = Dropped().double(), torch.randn(5, 4, dtype=torch.float64)
    compiled = parallelize(net, example_inputs=x).compiled
    mean = next(node for node in compiled.stage(0, 0).graph.nodes if node.target is torch.mean)
    mean.target = torch.amax
    with pytest.raises(VerifyError, match="the lowered program differs"):
        check_program(net, compiled, x)


def test_draws_are_replaced_by_their_mean() -> None:
    x = torch.rand(3, 4)
    with WithoutDraws():
        assert F.dropout(x) is x and F.dropout2d(x) is x
        assert torch.equal(torch.rand_like(x), torch.full_like(x, 0.5))
        assert torch.equal(torch.bernoulli(x), (x > 0.5).float())
        assert torch.equal(torch.rand(2, 3), torch.full((2, 3), 0.5))
        assert torch.equal(torch.randn((2, 3), dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))


def test_integers_that_are_drawn_lie_in_the_middle() -> None:
    with WithoutDraws():
        assert torch.randint(3, 9, (2,)).tolist() == torch.randint(low=3, high=9, size=[2]).tolist() == [5, 5]
        assert torch.randint(5, (2,), dtype=torch.int32).tolist() == [2, 2]
        assert torch.randint(5, (2,), dtype=torch.int32).dtype == torch.int32
