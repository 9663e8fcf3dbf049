"""unfold-feedback: a time loop with a matrix inside becomes T copies of its body, for tp ranks to share the matrix.

A `Loop` runs where its inputs lie, and no collective stands inside it. Recurrent weights need one: the spikes of all
channels come back at every step. Written out, each step's product is an operation of the graph like any other: it takes
the rows of the sharding table, its spikes are gathered as bits, and the placement counts T collectives each way. Only
loops whose matrices are to be shared are written out (`decide.constraints.to_share`); the rest stays folded.

Numerics: the same operations in the same order, so the tier is `exact`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from snnpart import facts
from snnpart.facts import Origin, Value, Values
from snnpart.graph import SpikeGraph, output_node
from snnpart.ops_time import Keep, Loop
from snnpart.passes.analyze import kinds

_PRODUCTS = ("conv", "linear", "matmul")


@dataclass(frozen=True)
class UnfoldFeedback:
    """Writes out the loops in which `shared` (path of a layer, steps -> bool) says that a matrix is to be dealt out."""

    name: ClassVar[str] = "unfold-feedback"
    reads: ClassVar[tuple[type, ...]] = (Value, Values, Origin)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    shared: Callable[[str, int], bool]

    def run(self, graph: SpikeGraph) -> None:
        notes = []
        for node in list(graph.graph.nodes):
            paths = [path for path in matrices_inside(node) if self.shared(path, node.target.steps)]
            if paths:
                notes.append(f"{node.target.steps} steps written out, for the tp ranks to share {_listed(paths)}")
                _write_out(node)
        if notes:
            graph.notes[self.name] = "\n".join(notes)


def matrices_inside(node: fx.Node) -> list[str]:
    """The layers whose weights a loop multiplies with; empty for another node."""
    loop = node.target
    if not isinstance(loop, Loop) or loop.together:
        return []
    sequences, fixed = len(node.args[0]), node.args[1]  # type: ignore[arg-type]
    found: dict[str, None] = {}
    for graph in loop.graphs:
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        weights = {
            inner: kinds.layer_of(str(outer.target))
            for inner, outer in zip(inputs[sequences:], fixed)  # type: ignore[arg-type, call-overload]
            if outer.op == "get_attr" and (value := facts.get(outer, Value)) is not None and len(value.shape) > 1
        }
        products = [n for n in graph.nodes if kinds.kind_of(n) in _PRODUCTS and not _in_groups(n)]
        found |= {weights[source]: None for n in products for source in n.all_input_nodes if source in weights}
    return list(found)


def _in_groups(node: fx.Node) -> bool:
    """A convolution whose channels stay apart, which needs no others at any step."""
    return kinds.kind_of(node) == "conv" and bool(kinds.argument(node, 6, "groups", 1) != 1)


def _write_out(node: fx.Node) -> None:
    """Put the steps of a loop in its place."""
    loop, graph = node.target, node.graph
    assert isinstance(loop, Loop)
    sequences, fixed, carried = (tuple(part) for part in node.args)  # type: ignore[union-attr, arg-type]
    results: list[list[Any]] = []
    with graph.inserting_before(node):
        for t in range(loop.steps):
            body = loop.first if t == 0 and loop.first is not None else loop.body
            out = _step(node, body, t, (sequences, fixed, carried))
            results.append(out[len(carried) :])
            carried = tuple(out[: len(carried)])
        for user in list(node.users):
            at = cast("int", user.args[1])
            user.replace_all_uses_with(_result(user, loop.keep[at], [step[at] for step in results]))
            graph.erase_node(user)
    graph.erase_node(node)


def _step(node: fx.Node, body: fx.Graph, t: int, given: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """A copy of the body; what it returns."""
    sequences, fixed, carried = given
    made: dict[fx.Node, Any] = {}
    inputs: Iterator[tuple[int, Any]] = enumerate((*sequences, *fixed, *carried))
    for inner in body.nodes:
        if inner.op == "placeholder":
            position, outer = next(inputs)
            made[inner] = _select(node, outer, inner, t) if position < len(sequences) and inner.users else outer
        elif inner.op != "output":
            args, kwargs = (map_arg(part, made.__getitem__) for part in (inner.args, inner.kwargs))
            made[inner] = node.graph.create_node(inner.op, inner.target, args, kwargs, inner.name)
            made[inner].meta = dict(inner.meta)
    returned: Any = map_arg(output_node(body).args[0], made.__getitem__)
    return list(returned)


def _select(node: fx.Node, sequence: fx.Node, inner: fx.Node, t: int) -> fx.Node:
    """Step t of what the loop reads step by step."""
    new = node.graph.call_function(torch.select, (sequence, 0, t))
    new.meta = {}
    facts.put(new, facts.need(inner, Value), facts.origin(node))
    return new


def _result(user: fx.Node, keep: Keep, steps: list[Any]) -> Any:
    """What stands for a result of the loop: its value of all steps, or of the last one."""
    assert user.target is operator.getitem
    if keep == "last":
        return steps[-1]
    new = user.graph.create_node("call_function", torch.stack, (steps,), {}, user.name)
    new.meta = dict(user.meta)
    return new


def _listed(paths: list[str]) -> str:
    return ", ".join(f"'{path}'" for path in paths)
