"""weights-later: which layers' weights have their gradient beside a sum over ranks, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import text
from snnpart.compilation import Options, compile_program
from snnpart.ops_later import WeightLater, later
from snnpart.program import CompiledProgram


class Net(nn.Module):
    """[N, 4, 6, 6] -> [N, 6]: all layers after the first read a value that is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3)
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3))
        return self.head(torch.tanh(self.hidden(y)))  # type: ignore[no-any-return]


class Normed(Net):
    """The weight of the second layer is computed from the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight / self.second.weight.norm()
        y = nn.functional.conv2d(torch.relu(self.first(x)), weight, self.second.bias)
        return self.head(torch.tanh(self.hidden(torch.relu(y).mean((2, 3)))))  # type: ignore[no-any-return]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)


X = torch.linspace(-1, 1, 4 * 4 * 36, dtype=torch.float64).view(4, 4, 6, 6)
COLUMNS = {"shard": {"first": "column", "second": "column", "hidden": "column", "head": "column"}}


def compiled(model: nn.Module, **options: Any) -> tuple[CompiledProgram, Any]:
    torch.manual_seed(0)
    return compile_program(model.double(), X, Options(**{"tp": 2, **COLUMNS, **options}))


def put_off(graph: fx.Graph) -> list[str]:
    """The weights that `later` is called with, by name, each read by one layer whose operation says so."""
    found = []
    for node in (node for node in graph.nodes if node.target is later):
        (reader,) = node.users
        assert isinstance(reader.target, WeightLater) and reader.args[1] is node
        found.append(str(node.args[0].target))
    return found


def test_layers_that_read_what_is_gathered_put_their_weights_off() -> None:
    program, report = compiled(Net())
    graph = program.stages[0, 0].graph
    assert put_off(graph) == ["second.weight", "hidden.weight", "head.weight"]
    assert report is not None
    order = [node for node in graph.nodes if node.target is later or "all_gather" in node.name]
    assert [node.target is later for node in order[:4]] == [True, False, True, False]


@pytest.mark.parametrize("model", [Normed(), Frozen()], ids=["computed", "frozen"])
def test_a_weight_that_is_computed_or_frozen_is_left_alone(model: nn.Module) -> None:
    program, report = compiled(model)
    assert put_off(program.stages[0, 0].graph) == ["hidden.weight", "head.weight"]
    assert report is not None


@pytest.mark.parametrize(
    "options",
    [{"tp": 1}, {"pp": 2, "schedule": "zbv", "microbatches": 2, "tp": 2}, {"saved": "packed"}],
    ids=["one rank", "backward in halves", "inputs kept as bits"],
)
def test_where_nothing_is_put_off(options: dict[str, Any]) -> None:
    """With one rank there is no sum, a schedule with halves puts off itself, and real inputs are not packed."""
    graphs = [stage.graph for stage in compiled(Net(), verify="off", **options)[0].stages.values()]
    wanted = ["second.weight", "hidden.weight", "head.weight"] if "saved" in options else []
    assert [name for graph in graphs[:1] for name in put_off(graph)] == wanted


def test_a_rank_without_channels_keeps_the_nodes_of_the_others() -> None:
    """Seven ranks share six channels."""
    program, report = compiled(Net(), tp=7)
    graphs = [program.stages[0, rank].graph for rank in range(7)]
    assert len({tuple(node.op for node in graph.nodes) for graph in graphs}) == 1
    assert put_off(graphs[0]) == [] and report is not None


def test_the_graph_is_written_and_read() -> None:
    graph = compiled(Net())[0].stages[0, 0].graph
    written = text.print_fx(graph)
    assert "weight_later torch.conv2d" in written
    assert text.print_fx(text.parse_fx(written)) == written
