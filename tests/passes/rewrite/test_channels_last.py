"""channels-last: one conversion at each entry of a convolutional region, and no hidden ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import frameworks
from snnpart.compilation import Options, compile_program
from snnpart.graph import Body
from snnpart.program import CompiledProgram
from tests.layouts import LayoutChanges


class Images(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: convolutions, norms, pooling, a skip connection, no neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = nn.functional.max_pool2d(self.second(y) + y, 2)
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Twice(Images):
    """Leaves the layout in between: channels are mixed by a linear layer over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = (y.flatten(2) @ torch.ones(144, 144, dtype=y.dtype)).unflatten(2, (12, 12))
        return self.head(self.second(y).mean((2, 3)))  # type: ignore[no-any-return]


def compiled(model: nn.Module, **options: Any) -> CompiledProgram:
    given: dict[str, Any] = {"verify": "off", "channels_last": True, **options}
    return compile_program(model, torch.rand(2, 3, 12, 12), Options(**given))[0]


def conversions(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target == "contiguous" and n.kwargs.get("memory_format") is torch.channels_last]


def body_of(program: CompiledProgram) -> Body:
    stage = program.stages[0, 0]
    tensors = {
        part.name: program.source.tensors[part.name]
        .tensor.detach()
        .clone(memory_format=torch.channels_last if part.channels_last else torch.contiguous_format)
        for part in stage.tensors
    }
    own = {p.name: ("parameter" if p.requires_grad else p.kind, tensors[p.name]) for p in stage.tensors if not p.leaf}
    return Body(own, {path: frameworks.clone_leaf(i.module, {}) for path, i in stage.leaves.items()})


@pytest.mark.parametrize(("make", "entries"), [(Images, 1), (Twice, 2)])
def test_layouts_change_where_the_graph_says_and_nowhere_else(make: type[Images], entries: int) -> None:
    program = compiled(make())
    graph = program.stages[0, 0].graph
    assert len(conversions(graph)) == entries
    body = body_of(program)
    body.training = True
    with LayoutChanges() as changes:
        body.bind(graph)(torch.rand(2, 3, 12, 12))
    assert len(changes.found) == entries


@pytest.mark.parametrize("dp", ["ddp", "fsdp2"])
def test_convolutions_weights_lie_so_too(dp: str) -> None:
    parts = {part.name: part.channels_last for part in compiled(Images(), dp=dp).stages[0, 0].tensors}
    assert {name for name, last in parts.items() if last} == {"first.weight", "second.weight"}


def test_a_plan_that_does_not_say_so_changes_nothing() -> None:
    assert conversions(compiled(Images(), channels_last=None).stages[0, 0].graph) == []


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}])
def test_the_program_computes_what_the_module_computes(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    _, report = compile_program(Images().double(), x, Options(channels_last=True, **options))
    assert report is not None
