"""Spikes are gathered as bits where links are slow: what travels, and that nothing else changes (case A22)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import facts, ops, simulate
from snnpart.costs import CPU, Link
from snnpart.errors import VerifyError
from snnpart.facts import Domain
from snnpart.gate.domains import check_domains
from snnpart.passes.decide import decide
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from snnpart.report import build
from tests.lowering import analysed, assert_parity, fire

SLOW = replace(CPU, links={axis: Link(1e6, 1.0) for axis in ("tp", "pp", "dp")})


class Count(nn.Module):
    """Linear layers with `ADD` residuals over spikes: values 0..1, 0..2, 0..3 (case A22)."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6 if i == 0 else width, width) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        counts = (self.layers[0](x) > 0.1).to(x)
        for layer in self.layers[1:]:
            counts = (layer(counts) > 0.1).to(x) + counts
        return counts


def _compiled(shards: dict[str, str], tp: int = 2) -> tuple[nn.Module, tuple[Tensor, ...], CompiledProgram]:
    torch.manual_seed(1)
    module, inputs = Count().double(), (torch.randn(32, 6, dtype=torch.float64),)
    graph = analysed(module, inputs)
    plan = decide(graph, tp=tp, pp=1, profile=SLOW, pinned=Plan(tp=tp, shards=shards))
    program = lower(graph, plan, profile=SLOW)
    simulate.dry_run(program)
    return module, inputs, program


def _gathers(program: CompiledProgram) -> list[fx.Node]:
    return [node for node in program.stage(0, 0).graph.nodes if node.target is ops.all_gather]


COLUMNS = {f"layers.{i}": "column" for i in range(4)}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sums_of_spikes_travel_as_few_bits(tp: int) -> None:
    module, inputs, program = _compiled(COLUMNS, tp)
    states = [node.args[4] if len(node.args) > 4 else None for node in _gathers(program)]
    assert states == [(0, 2), (0, 3), (0, 4), (0, 5)]
    with torch.no_grad():
        got = simulate.run(program, inputs, training=False).outputs[0]
        want = module(*inputs)
    assert torch.equal(got, want) and sorted(set(want.flatten().tolist()))[-1] >= 3


def test_the_report_counts_the_bits() -> None:
    _, _, program = _compiled(COLUMNS)
    rows = [row for row in build(program).collectives if row.operation == "all_gather"]
    assert [row.forward_bytes for row in rows] == [28 * width for width in (1, 2, 2, 3)]


def test_a_domain_that_does_not_hold_is_refused_by_the_gate() -> None:
    _, inputs, program = _compiled(COLUMNS)
    check_domains(program, inputs)
    spoiled = next(node for node in program.source.graph.nodes if facts.get(node, Domain) == Domain("integer", 0, 2))
    facts.put(spoiled, Domain("spike", 0, 1))
    with pytest.raises(VerifyError, match=r"holds 2\.0, which its domain \[0, 1\] does not") as refused:
        check_domains(program, inputs)
    assert f"%{spoiled.name}" in str(refused.value)


def test_reduce_scatter_before_a_neuron_and_bits_behind_it() -> None:
    """The alternative to an all-reduce: the membrane input is summed and scattered, spikes are gathered as bits."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm, self.c = nn.Linear(6, 8), nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(fire(self.norm(self.b(fire(self.a(x))))))

    module, inputs = Net().double(), (torch.randn(16, 6, dtype=torch.float64),)
    graph = analysed(module, inputs)
    shards = {"a": "column", "b": "scatter", "c": "column"}
    program = lower(graph, decide(graph, tp=2, pp=1, profile=SLOW, pinned=Plan(tp=2, shards=shards)), profile=SLOW)
    moves = [node.target for node in program.stage(0, 0).graph.nodes if node.target in ops.COLLECTIVES]
    assert moves[0] is ops.reduce_scatter and moves[1] is ops.all_gather and ops.all_reduce not in moves
    norm = {t.name: t.shape for t in program.stage(0, 1).tensors}
    assert norm["norm.running_mean"] == (3,) and norm["b.bias"] == (3,)
    assert_parity(module, inputs, program)
