"""The dry run finds each thing that can be wrong between ranks, and says where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from snnpart import facts, ops, simulate
from snnpart.errors import PlanError, VerifyError
from snnpart.facts import Value
from snnpart.plan import Plan
from snnpart.program import Action, CompiledProgram, StageProgram
from tests.lowering import assert_parity, compiled, fire, make


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    module, inputs, options = make("residual")
    pinned = Plan(tp=2, shards={"blocks.0.conv1": "column", "blocks.0.conv2": "row"})
    return compiled(module, inputs, tp=2, pp=2, microbatches=2, pinned=pinned, **options)


def _with(program: CompiledProgram, at: tuple[int, int], **changes: object) -> CompiledProgram:
    changed: StageProgram = replace(program.stages[at], **changes)  # type: ignore[arg-type]
    return replace(program, stages={**program.stages, at: changed})


def test_a_good_program_passes_and_is_predicted(program: CompiledProgram) -> None:
    found = simulate.dry_run(program)
    assert set(found.peak_bytes) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(size > 0 for size in found.peak_bytes.values()) and found.nodes > 50


def test_a_tensor_on_no_stage(program: CompiledProgram) -> None:
    for rank in range(2):
        kept = tuple(t for t in program.stage(1, rank).tensors if t.name != "head.weight")
        program = _with(program, (1, rank), tensors=kept)
    with pytest.raises(VerifyError, match=r"the tensor 'head.weight' is on no stage"):
        simulate.dry_run(program)


def test_a_tensor_on_two_stages(program: CompiledProgram) -> None:
    extra = next(t for t in program.stage(1, 0).tensors if t.name == "head.bias")
    program = _with(program, (0, 0), tensors=(*program.stage(0, 0).tensors, extra))
    with pytest.raises(VerifyError, match=r"the tensor 'head.bias' is on the stages \[0, 1\]"):
        simulate.dry_run(program)


def test_slices_that_do_not_cover(program: CompiledProgram) -> None:
    tensors = tuple(
        replace(t, pieces=((0, 3),)) if t.name == "blocks.0.conv1.weight" else t for t in program.stage(0, 0).tensors
    )
    with pytest.raises(VerifyError, match=r"slices .* of 'blocks.0.conv1.weight' do not cover dim 0 once"):
        simulate.dry_run(_with(program, (0, 0), tensors=tensors))


def test_a_send_nobody_receives(program: CompiledProgram) -> None:
    broken = _with(program, (1, 1), receives=())
    with pytest.raises(VerifyError, match=r"stage 0, tp rank 1: it sends .* receives \[\]"):
        simulate.dry_run(broken)


def test_shapes_that_disagree(program: CompiledProgram) -> None:
    port = program.stage(1, 0).receives[0]
    other = replace(port, value=replace(port.value, shape=(1, *port.value.shape[1:])))
    with pytest.raises(VerifyError, match=r"tp rank 0: it sends '.*' as .* receives it as \(\(1,"):
        simulate.dry_run(_with(program, (1, 0), receives=(other, *program.stage(1, 0).receives[1:])))


def _edited(program: CompiledProgram, change: object) -> CompiledProgram:
    """Stage 0 of tp rank 1 with a graph of its own that `change` has edited."""
    graph = _copy(program.stage(0, 1))
    for node in graph.nodes:
        if change(node):  # type: ignore[operator]
            return _with(program, (0, 1), graph=graph)
    raise AssertionError("nothing to change")


def _copy(stage: StageProgram):  # type: ignore[no-untyped-def]
    graph = torch.fx.Graph()
    out = graph.graph_copy(stage.graph, {})
    graph.output(out)
    return graph


def test_ranks_that_meet_in_other_collectives(program: CompiledProgram) -> None:
    def change(node: torch.fx.Node) -> bool:
        if node.target is not ops.all_reduce:
            return False
        node.target = ops.grad_all_reduce
        return True

    with pytest.raises(
        VerifyError, match=r"stage 0, tp rank 1: it meets the others in %all_reduce \(grad_all_reduce\)"
    ):
        simulate.dry_run(_edited(program, change))


def test_a_local_shape_that_is_not_the_stated_one(program: CompiledProgram) -> None:
    def change(node: torch.fx.Node) -> bool:
        if node.target is not torch.conv2d:
            return False
        value = facts.need(node, Value)
        facts.put(node, replace(value, shape=(value.shape[0], 99, *value.shape[2:])))
        return True

    with pytest.raises(VerifyError, match=r"stem.*stage 0, tp rank 1: it makes float64\[.*\], its fact states .*99"):
        simulate.dry_run(_edited(program, change))


def test_an_operation_that_fails_on_local_shapes(program: CompiledProgram) -> None:
    def change(node: torch.fx.Node) -> bool:
        if node.target is not torch.conv2d:
            return False
        node.args = (*node.args[:6], 2)
        return True

    with pytest.raises(VerifyError, match=r"stage 0, tp rank 1: it fails on the rank's local shapes"):
        simulate.dry_run(_edited(program, change))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("shape", r"stage 0, tp rank 1: it makes float64\[.*\], its fact states .*99"),
        ("collective", r"stage 0, tp rank 1: it meets the others in %shard \(shard\), tp rank 0 in %all_reduce"),
    ],
)
def test_a_graph_of_evaluations_is_checked_too(program: CompiledProgram, what: str, text: str) -> None:
    """Both ranks have one, of which rank 1's is wrong."""
    graph = _copy(program.stage(0, 1))
    if what == "shape":
        node = next(n for n in graph.nodes if n.target is torch.conv2d)
        value = facts.need(node, Value)
        facts.put(node, replace(value, shape=(value.shape[0], 99, *value.shape[2:])))
    else:
        node = next(n for n in graph.nodes if n.target is ops.all_reduce)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    both = _with(program, (0, 0), evaluation=_copy(program.stage(0, 0)))
    with pytest.raises(VerifyError, match=text):
        simulate.dry_run(_with(both, (0, 1), evaluation=graph))


def test_a_schedule_that_stops(program: CompiledProgram) -> None:
    first = program.schedule[0]
    with pytest.raises(PlanError, match=r"stage 0: the schedule stops: 0B1 waits for 0F1, 1B1"):
        simulate.dry_run(replace(program, schedule={**program.schedule, 0: first[::-1]}))


def test_a_schedule_that_forgets(program: CompiledProgram) -> None:
    short = {stage: tuple(a for a in actions if a != Action(0, "B", 1)) for stage, actions in program.schedule.items()}
    with pytest.raises(PlanError, match=r"stage 0: the schedule is not complete: 0B1 is missing"):
        simulate.dry_run(replace(program, schedule=short))


def test_nested_results_of_a_layer() -> None:
    """An LSTM gives (outputs, (h, c))."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, (_, cell) = self.lstm(x)
            return self.head(fire(out[:, -1] + cell[0]))

    module, inputs = Recurrent().double(), (torch.randn(4, 5, 3, dtype=torch.float64),)
    assert_parity(module, inputs, compiled(module, inputs, tp=2, pp=2))
