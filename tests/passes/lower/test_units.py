"""Where a stage's graph comes to FSDP2's units, and which parameters autocast rounds anyway."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from snnpart import artifact, facts
from snnpart.api import parallelize
from snnpart.facts import Gathers
from snnpart.passes.lower.units import mark_units, read_rounded
from snnpart.program import StageProgram
from tests.lowering import Tied, fire


def program_of(module: nn.Module, *inputs: Tensor, **options: Any) -> StageProgram:
    return parallelize(module, example_inputs=inputs, verify="off", dp="fsdp2", **options).compiled.stages[0, 0]


def marks(graph: fx.Graph) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    found = {node.name: facts.get(node, Gathers) for node in graph.nodes}
    return {name: (mark.begins, mark.ends) for name, mark in found.items() if mark is not None}


def test_the_first_and_the_last_reader_of_each_unit() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3))
    program = program_of(net, torch.randn(2, 4), fsdp_units=2)
    assert {part.name: part.unit for part in program.tensors} == {
        "0.weight": 0, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 1, "2.bias": 1, "3.weight": 1, "3.bias": 1,
    }  # fmt: skip
    assert marks(program.graph) == {
        "linear": ((0,), ()), "layer_norm": ((), (0,)), "linear_1": ((1,), ()), "linear_2": ((), (1,)),
    }  # fmt: skip


def test_a_view_is_read_for_its_parameter() -> None:
    """The first layer's unit ends with the last operation, which reads its weight transposed."""
    program = program_of(Tied(), torch.randn(2, 6), fsdp_units=2)
    last = [node for node in program.graph.nodes if node.op == "call_function"][-1]
    assert {part.name.split(".")[0]: part.unit for part in program.tensors} == {"first": 0, "between": 1}
    assert marks(program.graph)[last.name] == ((), (0,))


class Cell(nn.Module):
    """A neuron with a threshold for each channel: a leaf of a loop over time reads its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.threshold = nn.Parameter(torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros_like(x[0])
        spikes = []
        for step in x:
            v = 0.5 * v + self.first(step)
            spikes.append(fire(v - self.threshold))
        return self.second(torch.stack(spikes))


def test_a_loop_reads_what_its_steps_read() -> None:
    program = program_of(Cell(), torch.randn(3, 2, 4), fsdp_units=3, in_dims=1)
    found = marks(program.graph)
    unit = {part.name: part.unit for part in program.tensors}
    begins = [number for name in found for number in found[name][0]]
    assert sorted(begins) == begins == [0, 1, 2]
    assert unit["threshold"] != unit["first.weight"] != unit["second.weight"]


def test_outputs_end_no_unit() -> None:
    """A parameter that the network gives back is read by the user."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer.weight

    graph = program_of(Gives(), torch.randn(2, 4)).graph
    assert all(not ends for _, ends in marks(graph).values())


class Read(nn.Module):
    """Weights that are read once by a linear layer, twice, and by an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.plain = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(fire(self.twice(fire(self.once(x)))) + self.plain)


def test_only_what_autocast_rounds_before_its_one_reader_is_gathered_rounded() -> None:
    program = program_of(Read(), torch.randn(2, 4))
    assert read_rounded(program.graph) == {"once.weight", "once.bias"}
    assert {part.name for part in program.tensors if part.rounds} == {"once.weight", "once.bias"}


def test_autocast_rounds_what_is_taken_to_be_rounded() -> None:
    """Both operands of a linear layer and of a convolution, on this machine as well as on a GPU."""
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    image, kernel = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear(x, w), F.linear(x.bfloat16(), w.bfloat16()))
        assert torch.equal(F.conv2d(image, kernel), F.conv2d(image.bfloat16(), kernel.bfloat16()))
        assert F.linear(x, w).dtype is torch.bfloat16


def test_units_survive_a_saved_program(tmp_path: Any) -> None:
    program = parallelize(
        Cell(), example_inputs=torch.randn(3, 2, 4), in_dims=1, verify="off", dp="fsdp2", fsdp_units=3
    )
    program.save(tmp_path / "saved")
    loaded = artifact.load(tmp_path / "saved")
    assert loaded.plan == program.plan
    assert loaded.stages[0, 0].tensors == program.compiled.stages[0, 0].tensors
    assert marks(loaded.stages[0, 0].graph) == marks(program.compiled.stages[0, 0].graph) != {}


def test_without_fsdp2_nothing_is_marked() -> None:
    program = parallelize(Cell(), example_inputs=torch.randn(3, 2, 4), in_dims=1, verify="off").compiled.stages[0, 0]
    assert marks(program.graph) == {} and all(part.unit is None for part in program.tensors)
    mark_units(program.graph, ())
    assert marks(program.graph) == {}
