"""weights-later: which layers' weights have their gradient beside a sum over ranks, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spikingjelly.activation_based.neuron import IFNode
from torch import Tensor, fx, nn

from snnpart import text
from snnpart.compilation import Options, compile_program
from snnpart.ops_later import WeightLater, later
from snnpart.passes.lower.units import read_rounded
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


class Spikes(nn.Module):
    """[N, 4, 6, 6] -> [N, 6]: the layers after the first read spikes, which can be kept as bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 6)
        self.neuron = IFNode(v_threshold=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.neuron(self.first(x))).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "options"),
    [(Net(), {"tp": 1}), (Net(), {"pp": 2, "schedule": "zbv", "microbatches": 2})],
    ids=["one rank", "backward in halves"],
)
def test_where_nothing_is_put_off(model: nn.Module, options: dict[str, Any]) -> None:
    """With one rank there is no sum, and a schedule with halves puts off itself."""
    program, _ = compiled(model, verify="off", **options)
    assert [name for stage in program.stages.values() for name in put_off(stage.graph)] == []


def test_layers_that_keep_their_input_as_bits_are_left_alone() -> None:
    shard = {"first": "column", "second": "column", "head": "column"}
    names = {
        how: put_off(compiled(Spikes(), shard=shard, saved=how)[0].stages[0, 0].graph) for how in ("plain", "packed")
    }
    assert names == {"plain": ["second.weight", "head.weight"], "packed": ["head.weight"]}


class Rounds(nn.Module):
    """[N, 4] -> [6, N, 4]: three layers with states of their own between, over six steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        v, w = (torch.zeros(x.shape[0], 6, dtype=x.dtype) for _ in range(2))
        out = []
        for t in range(6):
            v = 0.5 * v + self.a(x * (1 + 0.1 * t))
            w = 0.5 * w + self.b(torch.sigmoid(3 * v))
            out.append(self.c(torch.sigmoid(3 * w)))
        return torch.stack(out)


def test_in_rounds_every_round_gives_its_gradient() -> None:
    """A weight that is read in each round is not put off."""
    x = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    program, report = compile_program(
        Rounds().double(), x, Options(tp=2, fold=2, shard={"a": "column", "b": "column", "c": "column"})
    )
    assert report is not None and program.plan.fold == 2
    assert put_off(program.stages[0, 0].graph) == []


def test_a_weight_that_autocast_rounds_is_gathered_so() -> None:
    graph = compiled(Net())[0].stages[0, 0].graph
    assert {"second.weight", "hidden.weight", "head.weight"} <= read_rounded(graph)


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
