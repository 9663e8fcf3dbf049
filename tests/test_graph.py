"""Which tensors lie in which leaves: own names, those of layers that share a tensor, and plain ones."""

from __future__ import annotations

import gc
import inspect
import linecache

import pytest
import torch
from torch import Tensor, nn

from snnpart.graph import Body, SpikeGraph
from snnpart.trace import trace


class Shared(nn.Module):
    """Two neuron layers that learn the same number, one deeper than the other, and one with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron

        self.first, self.other = (neuron.ParametricLIFNode(step_mode="m") for _ in range(2))
        self.block = nn.ModuleDict({"second": neuron.ParametricLIFNode(step_mode="m")})
        self.block["second"].w = self.first.w
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.block["second"](self.first(self.fc(x))))  # type: ignore[no-any-return]


@pytest.fixture
def graph() -> SpikeGraph:
    pytest.importorskip("spikingjelly")
    return trace(Shared(), torch.rand(2, 4, 3), time_dims=0, in_dims=1)


def test_each_leaf_has_its_tensors_by_the_names_that_it_knows(graph: SpikeGraph) -> None:
    assert graph.in_leaves() == {
        "first": {"first.w": "w"},
        "other": {"other.w": "w"},
        "block.second": {"first.w": "w"},
    }


def test_leaves_that_share_a_tensor_are_tied_to_the_first_that_is_called(graph: SpikeGraph) -> None:
    assert graph.tied_leaves() == {"first.w": "first", "block.second": "first", "other.w": "other"}


def test_a_graphs_function_has_its_lines_as_long_as_it_lives(graph: SpikeGraph) -> None:
    """Without them torch.compile of torch 2.11 takes all such functions for one, and stops compiling at the ninth."""
    body = Body({}, {})
    functions = [body.function_of(graph.graph) for _ in range(2)]
    assert "def forward(self" in inspect.getsource(functions[0])
    names = [function.__code__.co_filename for function in functions]
    assert len(set(names)) == 2 and set(names) <= set(linecache.cache)
    functions.clear()
    gc.collect()
    assert not set(names) & set(linecache.cache)
