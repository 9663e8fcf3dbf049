"""The sharding table: for each operation the rows by which tp ranks can share its work.

Spreads are those of `snnpart.facts`: R replicated, S(dim) sharded, P partial. A row says how inputs must lie, how the
result lies, and which inputs receive only this rank's part of their gradient. Every operation has the row `replicate`
(everything R); what else it has is given by its function in `TABLE`:

    operation                         rule       inputs                     result         partial gradient
    conv, linear, matmul and einsum   column     x R, W S(out), b S(0)      S(channel)     x
      with a weight W, bias b         row        x S(channel), W S(in), b R P              -  (b is added after the sum)
                                      scatter    x S(channel), W S(in)      S(channel)     -  (b S(0) is added after)
    embedding                         column     ids R, W S(1)              S(last)        -  (tied to a head: its row)
                                      row        ids R, W S(0)              P              -  (tied: its head's column)
    conv with groups                  group      x S(channel), W S(0)       S(channel)     -       cut at group borders
    batch_norm, instance_norm         shard      x S(1), its tensors S(0)   S(1)           -
    group_norm                        shard      x S(1), its tensors S(0)   S(1)           -       cut at group borders
        with fewer groups than ranks  statistics x S(1), its tensors S(0)   S(1)           -
    layer_norm, rms_norm, normalize   shard      x S, a dim not normalised  S              its scale and shift
    layer_norm, rms_norm              statistics x S, a normalised dim      S              -  (its tensors cut as x)
    neuron layer                      shard      x S(channel)               S(channel)     its scalar parameters
    element-wise, broadcasting        shard      full operands S, others R  S              the R operands
    dropout, rand_like                shard      S, mask drawn whole        S              -
    attention, matmul, einsum         shard      S, a batch dim (heads)     S              what lacks the dim
    chunk, split, reshape to q, k, v  shard      S in every section alike   S              -
    pixel_shuffle, pixel_unshuffle    shard      x S(1), in blocks of r*r   S(1)           -
    glu                               shard      S in both halves alike     S              -
    pooling, resizing, padding        shard      S, not a dim they resize   S              -
    views, cat, reductions, indexing  shard      S, where the dim survives  S              -
    a weight made from others         shard      S, what its reader needs   S              what lacks the dim

What a row costs: `column` sums x's gradient over ranks (all_reduce, backward), `row` sums the result (all_reduce,
forward), `scatter` sums it and keeps a share (reduce_scatter forward, gather backward): norm and neuron then run on
their slices. `statistics` gathers every rank's mean and variance, a few numbers a sample, and scatters their gradient
(`snnpart.ops_norm`). All others move nothing: forward and backward take 1/tp of the time. Where a producer's spread
differs from what a reader needs, R -> S is a local cut forward and a gather backward, S -> R a gather forward (as bits
where the domain has few states and the link is slow enough) and a cut backward, or a reduce-scatter where `column`
reads it.

Channels are dealt out evenly, the first ranks one more; a rank that has none of a layer's channels runs `ops.vacant` in
place of the layer's operations. Where an operation below needs whole heads, groups or blocks,
or the same share of each of q, k and v, its demand travels back to the layer that deals (`Deal`, `Misdealt`).

Random numbers: a value that is dealt out draws its mask whole on every rank from the same generator state, then keeps
the rank's channels. So masks are equal where values are replicated, differ where they are sharded, and are those of one
process with the same seed, for every tp (`ops.drawn_slice`).

The *lane* of a value is the one sharding it may have: channels are dealt out at convolutions and linears, and the lane
follows from there through the operations below. So each value is either R or on its lane, and the placement problem is
binary (see `placement`).

An operation that is not in the table, or whose arguments mix what lies on different ranks, declines with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, lcm
from typing import Any

from torch import fx

from snnpart import facts
from snnpart.facts import Pieces, Replicated, Sharded, Spread, Value, Values
from snnpart.graph import SpikeGraph
from snnpart.hooks import needs_whole

R = Replicated()


class Declined(Exception):
    """The operation cannot be sharded this way; the text says why."""


class Misdealt(Declined):
    """The operation could be sharded if the channels were dealt out otherwise: see `Deal`.

    `size` is the extent of the sharded dim where the rule stands; `sections` and `unit` are in its elements.
    """

    def __init__(self, reason: str, size: int, *, sections: int = 1, unit: int = 1) -> None:
        super().__init__(reason)
        self.size, self.sections, self.unit = size, sections, unit


@dataclass(frozen=True, slots=True)
class Deal:
    """How a matrix operation's output channels are dealt out: each of `sections` equal parts (query, key and value in
    one projection) on its own, in whole units of `unit` channels (a head, a group)."""

    sections: int = 1
    unit: int = 1

    def pieces(self, size: int, ranks: int) -> tuple[Pieces, ...]:
        """What each rank gets of `size` channels; Declined when there is one unit only."""
        part = size // self.sections
        if part * self.sections != size or part % self.unit:
            raise Declined(f"{size} channels are not {self.sections} sections of whole units of {self.unit}")
        return self.repeated(scaled(even(part // self.unit, ranks), self.unit), self.sections, part)

    @staticmethod
    def repeated(pieces: tuple[Pieces, ...], sections: int, part: int) -> tuple[Pieces, ...]:
        """The pieces of one section of `part` channels, the same in all sections."""
        return tuple(
            tuple((start + i * part, stop + i * part) for i in range(sections) for start, stop in own) for own in pieces
        )

    def asked(self, demand: Misdealt, channels: int) -> Deal:
        """The deal that meets the demand too; `channels` is the size that is dealt out."""
        need = demand.unit * channels
        unit = need // gcd(need, demand.size)
        if demand.sections > self.sections:
            return Deal(demand.sections, 1)
        return Deal(self.sections, lcm(self.unit, unit))


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
    deals: Mapping[fx.Node, Deal] = field(default_factory=dict)

    @cached_property
    def hooked(self) -> frozenset[str]:
        """Tensors with a gradient hook that must see the whole gradient."""
        return frozenset(name for name, info in self.graph.tensors.items() if needs_whole(info.tensor))

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
    """`size` channels dealt out evenly, the first ranks one more where it does not divide; with fewer channels than
    ranks the last ranks have none. A single channel (head, group) is not dealt out."""
    if size < 2 <= ranks:
        raise Declined("there is one channel only")
    bounds = [rank * (size // ranks) + min(rank, size % ranks) for rank in range(ranks + 1)]
    return tuple(((start, stop),) if stop > start else () for start, stop in zip(bounds, bounds[1:], strict=False))


def scaled(pieces: tuple[Pieces, ...], factor: int) -> tuple[Pieces, ...]:
    """Pieces of a dim that is merged with `factor` inner elements for each channel."""
    return tuple(tuple((start * factor, stop * factor) for start, stop in own) for own in pieces)


def divided(pieces: tuple[Pieces, ...], factor: int, what: str) -> tuple[Pieces, ...]:
    """Pieces in units of `factor` channels; Declined where a piece does not end at such a border."""
    if any(bound % factor for own in pieces for piece in own for bound in piece):
        raise Misdealt(
            f"the ranks' channels do not end at the borders of {what} of {factor}", extent(pieces), unit=factor
        )
    return tuple(tuple((start // factor, stop // factor) for start, stop in own) for own in pieces)


def extent(pieces: tuple[Pieces, ...]) -> int:
    """The size of the whole dim."""
    return sum(stop - start for own in pieces for start, stop in own)


def of_section(pieces: tuple[Pieces, ...], sections: int) -> tuple[Pieces, ...]:
    """What each rank holds of one of `sections` equal parts; Misdealt where a rank holds other channels of another."""
    size = extent(pieces)
    part = size // sections
    if part * sections != size:
        raise Declined(f"{size} channels are not {sections} equal sections")
    found = tuple(tuple(piece for piece in own if piece[1] <= part) for own in pieces)
    if Deal.repeated(found, sections, part) != pieces:
        raise Misdealt(
            f"the ranks do not hold the same channels of each of {sections} sections", size, sections=sections
        )
    return found


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
    elif isinstance(items, Values):
        yield from _flat(items.items)
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
