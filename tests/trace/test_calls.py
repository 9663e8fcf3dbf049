"""Example inputs in all their forms, and what comes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from snnpart.errors import ConfigError, TraceError
from snnpart.trace import trace
from tests.neurons import LIF, data, fill
from tests.trace.parity import check


class Two(nn.Module):
    """Two inputs, an option, and a nested output with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.out = nn.Linear(4, 6), LIF(), nn.Linear(6, 3)

    def forward(self, image: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> dict[str, Any]:
        z = self.n(self.l(image) * gain)
        z = z if mask is None else z * mask
        return {"logits": self.out(z), "extra": (None, [z, 3]), "hook": None}


def test_positional_arguments() -> None:
    graph = check(fill(Two()), (data(5, 4), data(5, 6).abs()), others=(data(8, 4), data(8, 6).abs()))
    assert [info.name for info in graph.inputs] == ["image", "mask"]
    assert [(o.name, o.batch_dim) for o in graph.outputs] == [("output.logits", 0), ("output.extra.1.0", 0)]
    assert list(graph.out_constants.values()) == [None, 3, None]


def test_keyword_arguments_and_constants() -> None:
    graph = check(fill(Two()), {"mask": None, "image": data(5, 4), "gain": 2.0})
    assert [info.name for info in graph.inputs] == ["image"]
    constants = [a.text for a in graph.assumptions if a.kind == "constant"]
    assert constants == ["the input None is the same in every call", "the input 2.0 is the same in every call"]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, pair: list[Tensor], *rest: Tensor, batch_size: Tensor) -> Tensor:
        return self.l(pair[0] + pair[1]) + rest[0] + batch_size


class Variadic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, pair: list[Tensor], *rest: Tensor) -> Tensor:
        return self.l(pair[0] + pair[1]) + rest[0]


def test_nested_inputs_have_names_of_their_own() -> None:
    graph = check(fill(Variadic()), ([data(3, 4), data(3, 4)], data(3, 4)))
    assert [info.name for info in graph.inputs] == ["pair_0", "pair_1", "rest_0"]


def test_an_argument_named_as_the_graph_names_the_batch() -> None:
    class Odd(nn.Module):
        def forward(self, batch_size: Tensor) -> Tensor:
            return batch_size.reshape(batch_size.shape[0], -1) * 2

    graph = check(Odd(), data(3, 2, 2), others=data(4, 2, 2))
    assert [info.name for info in graph.inputs] == ["batch_size_1"]


class Pair(NamedTuple):
    spikes: Tensor
    total: Tensor


class GivesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(4, 6), LIF()

    def forward(self, x: Tensor) -> Pair:
        z = self.n(self.l(x))
        return Pair(z, z.sum())


def test_a_named_tuple_and_a_scalar_output() -> None:
    graph = check(fill(GivesPair()), data(3, 4), others=data(5, 4))
    assert [(o.name, o.batch_dim) for o in graph.outputs] == [("output.spikes", 0), ("output.total", None)]


def test_out_dims_win() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 4), LIF()))
    assert trace(model, data(3, 4), out_dims=1).outputs[0].batch_dim == 1
    assert trace(model, data(3, 4), out_dims=-1).outputs[0].batch_dim == 1
    assert trace(model, data(3, 4), out_dims=[None]).outputs[0].batch_dim is None
    with pytest.raises(ConfigError, match="out_dims=5 is outside"):
        trace(model, data(3, 4), out_dims=5)
    with pytest.raises(ConfigError, match="out_dims has 2 entries for 1"):
        trace(model, data(3, 4), out_dims=[0, 1])


class Pairwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def test_an_output_with_two_batch_dims_is_ambiguous() -> None:
    with pytest.raises(TraceError, match=r"dims \[0, 1\] of 'output'.*may each be the batch") as caught:
        trace(Pairwise(), data(3, 4))
    assert "out_dims=" in str(caught.value)
    assert trace(Pairwise(), data(3, 4), out_dims=0).outputs[0].batch_dim == 0


@pytest.mark.parametrize(
    ("inputs", "options", "match"),
    [
        ((data(3, 4), data(5, 6)), {}, "different batch sizes: image 3, mask 5"),
        ("words", {}, "hold no tensor"),
        ({"picture": data(3, 4)}, {}, "does not take the example inputs"),
        (data(3, 4), {"time_steps": 0}, "time_steps=0"),
        (data(3, 5, 4), {"time_steps": 4, "time_dims": 1}, "'image' has 5 steps in dim 1, time_steps=4"),
    ],
)
def test_bad_inputs_are_named(inputs: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        trace(fill(Two()), inputs, **options)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(4, 6), LIF()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.n(self.l(x)), None


@pytest.mark.parametrize(("shape", "time_dim"), [((3, 4), None), ((3, 5, 4), 1)])
def test_a_single_step_module_called_t_times(shape: tuple[int, ...], time_dim: int | None) -> None:
    graph = check(fill(Step()), data(*shape), time_steps=5, time_dims=time_dim, others=data(7, *shape[1:]))
    assert graph.time_steps == 5 and graph.outputs[0].batch_dim == 1
    assert [(s.module, s.name) for s in graph.states] == [("n", "v")]


def test_an_output_that_no_graph_holds() -> None:
    class Bag:
        pass

    class GivesBag(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2, Bag()

    class GivesNothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return None

    with pytest.raises(TraceError, match="returns a Bag"):
        trace(GivesBag(), data(2, 2))
    with pytest.raises(TraceError, match="returns no tensor"):
        trace(GivesNothing(), data(2, 2))


def test_inputs_parameters_and_buffers_may_be_returned() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x: Tensor) -> Any:
            return x, self.w, self.b, x

    graph = check(Gives().double(), data(2, 3))
    assert [o.batch_dim for o in graph.outputs] == [0, None, None, 0]
