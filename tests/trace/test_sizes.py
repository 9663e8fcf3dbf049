"""What the code asks about sizes while it is traced."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.errors import TraceError
from snnpart.graph import SpikeGraph
from snnpart.text import parse_graph, print_graph
from snnpart.trace import sizes, trace
from snnpart.trace.sizes import Comparisons, Size
from tests.neurons import data


def compared(graph: SpikeGraph) -> set[str]:
    return {str(guard) for guard in graph.guards}


class Asks(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.ask(x) else x + 1


@pytest.mark.parametrize(
    ("ask", "guard", "holds_at", "broken_at"),
    [
        (lambda x: x.shape[0] > 1, "N > 1 is True", 2, 1),
        (lambda x: x.size(0) <= 1, "N <= 1 is False", 2, 1),
        (lambda x: x.size(dim=0) == 1, "N == 1 is False", 9, 1),
        (lambda x: x.size()[0] * x.shape[1] > 90, "(N * 3) > 90 is False", 30, 31),
        (lambda x: x.numel() < 12 * 6, "(12 * N) < 72 is True", 5, 6),
        (lambda x: x.reshape(-1, 4).shape[0] % 3 == 1, "((3 * N) % 3) == 1 is False", 1, None),
        (lambda x: x[:-1].shape[0] > 7, "(N + -1) > 7 is False", 8, 9),
        (lambda x: 40 - x.shape[0] > 0, "(40 - N) > 0 is True", 39, 40),
        (lambda x: max(x.shape[0], 1) > 7.5, "N > 7.5 is False", 7, 8),
        (lambda x: x.shape == (1, 3, 4), "N == 1 is False", 2, 1),
        (lambda x: x.shape[0] - 1 and x.shape[0], "(N - 1) != 0 is True", 2, 1),
        (lambda x: len(x) > 1, "N > 1 is True", 2, 1),
        (lambda x: len(x[1:]) < 1, "(N + -1) < 1 is False", 3, 1),
        (lambda x: len(x) / 2 > 0.75, "(N / 2) > 0.75 is True", 2, 1),
        (lambda x: x.shape[0] * 0.5 - 0.5 <= 0, "((N * 0.5) - 0.5) <= 0 is False", 3, 1),
        (lambda x: 12 / x.shape[0] == 12, "(12 / N) == 12 is False", 2, 1),
        (lambda x: x.shape[0] / 4 - 0.25, "((N / 4) - 0.25) != 0 is True", 2, 1),
    ],
)
def test_a_comparison_of_the_batch_size(ask: Any, guard: str, holds_at: int, broken_at: int | None) -> None:
    model = Asks(ask)
    graph = trace(model, data(4, 3, 4))
    assert not graph.batch_fixed and guard in compared(graph)
    assert graph.broken_at(holds_at) is None
    texts = [a.text for a in graph.assumptions if a.kind == "branch"]
    if broken_at is None:
        assert not texts
    else:
        found = graph.broken_at(broken_at)
        assert found is not None and "test_sizes.py:" in found.place
        assert f"the code compares the batch size N: {found}" in texts
        assert bool(ask(data(broken_at, 3, 4))) != bool(ask(data(4, 3, 4)))


def test_other_sizes_are_no_matter_of_the_batch() -> None:
    graph = trace(Asks(lambda x: x.shape[1] > 1 and x.shape[0] == x.sum(1).shape[0]), data(4, 3, 4))
    assert not any("N >" in text for text in compared(graph)) and graph.broken_at(1) is None
    assert not any(a.kind == "branch" for a in graph.assumptions)


def test_a_comparison_that_comes_out_otherwise_at_the_second_size_fixes_the_batch() -> None:
    assert trace(Asks(lambda x: x.shape[0] > 3), data(4, 3, 4)).batch_fixed


def test_guards_have_a_text_form() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4), Asks(lambda x: x.shape[0] > 1)), torch.zeros(4, 4))
    assert graph.guards and parse_graph(print_graph(graph)).guards == graph.guards == graph.copy().guards


def test_a_size_is_an_int_in_every_other_way() -> None:
    asked = Comparisons()
    size = Size.of(3, asked)
    shape = torch.Size([size, 4])
    assert torch.zeros(shape).view(size * 2, -1)[:size].shape == (3, 2) and list(range(size)) == [0, 1, 2]
    assert type(sizes.plain(shape)[0]) is int and {3: "x"}[size] == "x" and f"{size}" == "3"
    assert type(pickle.loads(pickle.dumps(size))) is int and type(copy.deepcopy(size)) is int
    assert size / 2 == 1.5 and size != "3" and (size == None) is False  # noqa: E711
    assert type(sizes.plain(size * 1.0)) is float and type(pickle.loads(pickle.dumps(size / 2))) is float
    assert torch.ones(2).mul(size / 2).tolist() == [1.5, 1.5] and f"{size / 2:.2f} {size * 0.1}" == f"1.50 {3 * 0.1}"
    asked.open, known = False, dict(asked.found)
    assert size > 1 and asked.found == known


def test_len_is_pythons_own_again_after_a_trace() -> None:
    own = len
    trace(Asks(lambda x: len(x) > 1), data(4, 3, 4))
    with pytest.raises(TraceError, match="len.. of a 0-d tensor"):
        trace(Asks(lambda x: len(x.sum()) > 1), data(4, 3, 4))
    assert len is own and type(len(torch.zeros(3, 1))) is int


def test_a_long_sum_is_no_longer_followed() -> None:
    size = Size.of(3, Comparisons())
    total: Any = 0
    for _ in range(100):
        total = total + size
    assert total == 300 and type(size + size) is Size
