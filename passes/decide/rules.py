"""The sharding table: for each operation the rows by which tp ranks can share its work.

Spreads are those of `snnpart.facts`: R replicated, S(dim) sharded, P partial. A row says how inputs must lie, how the
result lies, and which inputs receive only this rank's part of their gradient. Every operation has the row `replicate`
(everything R); what else it has is given by its function in `TABLE`:

    operation                         rule       inputs                     result         partial gradient
    conv, linear (weight W, bias b)   column     x R, W S(out), b S(0)      S(channel)     x
                                      row        x S(channel), W S(in), b R P              -  (b is added after the sum)
    conv with groups                  group      x S(channel), W S(0)       S(channel)     -       cut at group borders
    batch_norm                        shard      x S(1), its tensors S(0)   S(1)           -
    neuron layer                      shard      x S(channel)               S(channel)     its scalar parameters
    element-wise, broadcasting        shard      full operands S, others R  S              the R operands
    pooling, views, cat, reductions   shard      S, where the dim survives  S              -

The *lane* of a value is the one sharding it may have: channels are dealt out at convolutions and linears, and the lane
follows from there through the operations below. So each value is either R or on its lane, and the placement problem is
binary (see `placement`).

An operation that is not in the table, or whose arguments mix what lies on different ranks, declines with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from snnpart import facts
from snnpart.facts import Pieces, Replicated, Sharded, Spread, Value, Values
from snnpart.graph import SpikeGraph

R = Replicated()


class Declined(Exception):
    """The operation cannot be sharded this way; the text says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, for the inputs `node.all_input_nodes`."""

    rule: str
    output: Spread
    inputs: tuple[Spread, ...]
    partial: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ask:
    """What a rule may look at: the graph, the number of tp ranks, and the lanes found so far."""

    graph: SpikeGraph
    tp: int
    lanes: Mapping[fx.Node, Sharded | None]

    def lane(self, node: Any) -> Sharded | None:
        return self.lanes.get(node) if isinstance(node, fx.Node) else None

    def need(self, node: Any) -> Sharded:
        """The lane of an input that must have one."""
        lane = self.lane(node)
        if lane is None:
            raise Declined("its input cannot be sharded")
        return lane


Rule = Callable[[fx.Node, Ask], Row]


def shape(node: Any) -> tuple[int, ...]:
    """Shape of a tensor node; Declined for what is none."""
    value = facts.get(node, Value) if isinstance(node, fx.Node) else None
    if value is None:
        raise Declined("an operand is no tensor")
    return value.shape


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and facts.get(node, Value) is not None


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def first_lane(node: fx.Node, ask: Ask) -> fx.Node:
    """The first input that has a lane."""
    found = next((n for n in node.all_input_nodes if ask.lane(n) is not None), None)
    if found is None:
        raise Declined("its input cannot be sharded")
    return found


def row(node: fx.Node, output: Spread, needs: Mapping[fx.Node, Spread], rule: str = "shard") -> Row:
    """A row in which the inputs not named are R, and R inputs that carry gradients receive them in part."""
    inputs = tuple(needs.get(n, R) for n in node.all_input_nodes)
    partial = tuple(
        i
        for i, n in enumerate(node.all_input_nodes)
        if inputs[i] == R and is_tensor(n) and facts.need(n, Value).requires_grad
    )
    return Row(rule, output, inputs, partial)


def replicate(node: fx.Node) -> Row:
    return Row("replicate", R, (R,) * len(node.all_input_nodes))


def even(size: int, ranks: int) -> tuple[Pieces, ...]:
    """`size` channels dealt out evenly, the first ranks one more where it does not divide."""
    if size < ranks:
        raise Declined(f"{size} channels are fewer than {ranks} ranks")
    bounds = [rank * (size // ranks) + min(rank, size % ranks) for rank in range(ranks + 1)]
    return tuple(((start, stop),) for start, stop in zip(bounds, bounds[1:], strict=False))


def scaled(pieces: tuple[Pieces, ...], factor: int) -> tuple[Pieces, ...]:
    """Pieces of a dim that is merged with `factor` inner elements for each channel."""
    return tuple(tuple((start * factor, stop * factor) for start, stop in own) for own in pieces)


def divided(pieces: tuple[Pieces, ...], factor: int, what: str) -> tuple[Pieces, ...]:
    """Pieces in units of `factor` channels; Declined where a piece does not end at such a border."""
    if any(bound % factor for own in pieces for piece in own for bound in piece):
        raise Declined(f"the ranks' channels do not end at the borders of {what} of {factor}")
    return tuple(tuple((start // factor, stop // factor) for start, stop in own) for own in pieces)


def results(node: fx.Node) -> Iterator[Value]:
    """The tensors a node makes."""
    value, values = facts.get(node, Value), facts.get(node, Values)
    if value is not None:
        yield value
    elif values is not None:
        yield from _flat(values.items)


def _flat(items: Any) -> Iterator[Value]:
    if isinstance(items, Value):
        yield items
    elif isinstance(items, (tuple, list)):
        for item in items:
            yield from _flat(item)


def checked(node: fx.Node, found: Row) -> Row:
    """The row, if the sharded dim of every result is as long as the pieces together and does not carry the batch."""
    if isinstance(found.output, Sharded):
        total = sum(found.output.size(rank) for rank in range(len(found.output.pieces)))
        dim = found.output.dim
        for value in results(node):
            if dim >= len(value.shape) or value.shape[dim] != total or value.slopes[dim]:
                raise Declined("a result does not keep the channels in one dim")
    return found
