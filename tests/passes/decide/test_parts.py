"""What a pipeline may cut apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from snnpart.passes.decide.parts import find_parts
from tests.lowering import analysed, fire, make


def _keys(module: nn.Module, *inputs: Tensor) -> list[set[str]]:
    return [set(part.keys) for part in find_parts(analysed(module.double(), inputs)).keyed]


def test_a_time_loop_is_one_part_per_layer_that_is_on_no_cycle() -> None:
    module, inputs, _ = make("loop")
    keys = _keys(module, *inputs)
    assert keys == [
        {"inward.weight", "inward.bias"},
        {"recurrent.weight", "recurrent.bias"},
        {"out.weight", "out.bias"},
    ]


def test_tied_weights_join_everything_between_them() -> None:
    module, inputs, _ = make("tied")
    assert len(_keys(module, *inputs)) == 1


def test_weights_computed_from_tensors_stay_with_their_layer() -> None:
    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.gain = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.ones(5, 1))
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            weight = (self.w - self.w.mean(1, keepdim=True)) * self.gain
            return self.head(fire(nn.functional.linear(x, weight)))

    keys = _keys(Standardised(), torch.randn(3, 4, dtype=torch.float64))
    assert keys == [{"w", "gain"}, {"head.weight", "head.bias"}]


def test_what_follows_from_inputs_alone_is_everywhere() -> None:
    module, inputs, _ = make("loop")
    graph = analysed(module, inputs)
    parts = find_parts(graph)
    assert {"x"} <= {str(node.target) for node in parts.everywhere if node.op == "placeholder"}
    assert not any(node.target is nn.functional.linear for node in parts.everywhere)
    covered = [node for part in parts.parts for node in part.nodes]
    assert len(covered) == len(set(covered)) == len(graph.graph.nodes) - 1 - len(parts.everywhere)


def test_random_numbers_are_drawn_in_one_stage() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            return self.b(fire(self.a(x)) + noise)

    graph = analysed(Noisy().double(), (torch.randn(3, 4, dtype=torch.float64),))
    parts = find_parts(graph)
    (noise,) = [n for n in graph.graph.nodes if "rand_like" in str(n.target)]
    assert noise not in parts.everywhere
