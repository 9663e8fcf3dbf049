"""stack-places: a tensor that is filled place by place is the stack of what fills it. Bit-exact.

    out = torch.zeros(x.shape)                     stack of s_0 ... s_{T-1} along the last dim;
    for t in range(T):                    ->       what reads out[..., t - 1] in the loop reads s_{t-1}
        u, out[..., t] = step(u, out[..., max(t - 1, 0)], x[..., t])

Networks that keep time in a dim of their own are written so (tdBN and many after it). As T copies of the whole tensor,
each with one place more, no loop could be seen in them.

A place that is read before it is filled is read from the tensor as it was made. What fills it takes its dtype, which
under autocast may be another than that of the values: a cast stands for it, or `type_as` where the tensor was made like
another one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from snnpart import effects, facts, ops
from snnpart.facts import Value
from snnpart.graph import SpikeGraph
from snnpart.passes.analyze.kinds import argument, name_of
from snnpart.passes.rewrite.canonicalize import sweep

NAME = "stack-places"
_LIKE = ("zeros_like", "empty_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full")
_MADE = (*_LIKE, "zeros", "empty", "ones", "full")


@dataclass(frozen=True)
class StackPlaces:
    """Replaces filled tensors, and reads of what fills them. It expects a canonicalized graph."""

    name: ClassVar[str] = NAME
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        filled: dict[fx.Node, _Filled] = {}
        for node in list(graph.graph.nodes):
            found = _filling(node, filled)
            if found is not None:
                filled[node] = found
        if filled:
            casts = _Casts()
            _read_values(graph.graph, filled, casts)
            for node, found in filled.items():
                if found.is_full:
                    _stack(node, found, casts)
            sweep(graph.graph)


@dataclass(frozen=True)
class _Filled:
    """A tensor made by `base`, whose places `values` along `dim`, of `size`, have been filled."""

    base: fx.Node
    dim: int
    size: int
    values: Mapping[int, fx.Node] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.values) == self.size


def _filling(node: fx.Node, filled: Mapping[fx.Node, _Filled]) -> _Filled | None:
    """What an assignment of one place leaves, of a tensor that is made for being filled."""
    if node.target is not ops.index_assign:
        return None
    before, index, value = node.args
    if not isinstance(value, fx.Node) or any(effects.is_in_place(user) for user in value.users):
        return None
    made, given = facts.get(node, Value), facts.get(value, Value)
    place = None if made is None else _place(index, made)
    if place is None or made is None or given is None:
        return None
    dim, number = place
    if (*made.shape[:dim], *made.shape[dim + 1 :]) != given.shape or made.dtype != given.dtype or made.slopes[dim]:
        return None
    found = filled.get(before) or _begun(before, dim, made)  # type: ignore[arg-type]
    if found is None or found.dim != dim:
        return None
    return replace(found, values={**found.values, number: value})


def _begun(base: Any, dim: int, made: Value) -> _Filled | None:
    made_for_it = isinstance(base, fx.Node) and name_of(base) in _MADE and base.kwargs.get("requires_grad") is not True
    return _Filled(base, dim, made.shape[dim]) if made_for_it else None


def _place(index: Any, value: Value) -> tuple[int, int] | None:
    """The dim of which an index takes one place, and that place; None where it takes something else."""
    items = index if isinstance(index, tuple) else (index,)
    numbers = [(dim, item) for dim, item in enumerate(items) if type(item) is int]
    if len(numbers) != 1 or any(item != slice(None) for item in items if type(item) is not int):
        return None
    dim, number = numbers[0]
    return dim, number % value.shape[dim]


def _read_values(graph: fx.Graph, filled: Mapping[fx.Node, _Filled], casts: _Casts) -> None:
    """Have what reads one place of a tensor under way read what fills it, or the tensor as it was made."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        found = filled.get(source) if isinstance(source, fx.Node) else None
        place = None if found is None else _read_place(node)
        if found is None or place is None or place[0] != found.dim:
            continue
        if place[1] in found.values:
            node.replace_all_uses_with(casts.of(found.values[place[1]], found.base))
        else:
            node.replace_input_with(source, found.base)  # type: ignore[arg-type]


def _read_place(node: fx.Node) -> tuple[int, int] | None:
    source = facts.need(node.args[0], Value)  # type: ignore[arg-type]
    if node.target is operator.getitem:
        return _place(node.args[1], source)
    if node.target is not torch.select:
        return None
    dim, number = argument(node, 1, "dim"), argument(node, 2, "index")
    return (dim, number % source.shape[dim]) if type(number) is int else None


def _stack(node: fx.Node, found: _Filled, casts: _Casts) -> None:
    values = [casts.of(found.values[place], found.base) for place in range(found.size)]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(torch.stack, (values, found.dim))
    made.meta = dict(node.meta)
    facts.put(made, replace(facts.origin(node), made_by=NAME))
    node.replace_all_uses_with(made)


@dataclass(frozen=True)
class _Casts:
    """Values as the tensors that they fill hold them; one cast of a value is enough for all who read it."""

    made: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)

    def of(self, value: fx.Node, base: fx.Node) -> fx.Node:
        if (value, base) not in self.made:
            self.made[value, base] = value if _source(base) is value else _cast(value, base)
        return self.made[value, base]


def _cast(value: fx.Node, base: fx.Node) -> fx.Node:
    """Behind the value, or the tensor like which the other was made."""
    source = _source(base)
    behind = value if source is None else max(value, source)
    target, other = ("to", facts.need(base, Value).dtype) if source is None else ("type_as", source)
    with value.graph.inserting_after(behind):
        made = value.graph.call_method(target, (value, other))
    facts.put(made, facts.need(value, Value), replace(facts.origin(value), made_by=NAME))
    return made


def _source(base: fx.Node) -> fx.Node | None:
    """The tensor like which it was made, whose dtype it has."""
    given = base.args[0] if base.args else None
    like = name_of(base) in _LIKE and base.kwargs.get("dtype") is None and isinstance(given, fx.Node)
    return given if like else None  # type: ignore[return-value]
