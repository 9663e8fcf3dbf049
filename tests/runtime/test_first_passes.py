"""Which passes send their messages over the host."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from snnpart.runtime.first_passes import FIRST, FirstPasses


class Program:
    pass


@dataclass
class Bound:
    program: Any = field(default_factory=Program)


@dataclass
class Part:
    size: int
    bound: dict[int, Bound]


def parts(bound: Bound, *sizes: int) -> Any:
    return [Part(size, {0: bound}) for size in sizes]


def test_the_first_passes_of_each_kind_and_no_later_one() -> None:
    seen, bound = FirstPasses(), Bound()
    assert [seen.next_is_first(parts(bound, 4, 4), True) for _ in range(4)] == [True] * FIRST + [False] * 2
    assert seen.next_is_first(parts(bound, 4, 3), True)  # other sizes: other algorithms are tried
    assert seen.next_is_first(parts(bound, 4, 4), False)
    with torch.no_grad():
        assert seen.next_is_first(parts(bound, 4, 4), True)
    assert seen.next_is_first(parts(Bound(), 4, 4), True)


def test_a_network_that_is_gone_is_forgotten() -> None:
    seen, bound = FirstPasses(), Bound()
    for _ in range(FIRST):
        seen.next_is_first(parts(bound, 4), True)
    del bound
    gc.collect()
    assert not seen._runs
