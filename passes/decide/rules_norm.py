"""Rows of norms and of what else works on whole dims behind the channels: the sharded dim must not be mixed."""

from __future__ import annotations

from typing import Any

from torch import fx

from snnpart import facts
from snnpart.bits import states_of
from snnpart.facts import Domain, Sharded, Spread, Value
from snnpart.passes.decide.rules import Ask, Declined, Row, argument, divided, is_tensor, row, scaled, shape
from snnpart.passes.decide.rules_matrix import einsum_terms
from snnpart.passes.rewrite.shared_statistics import STATISTICS


def layer_norm(node: fx.Node, ask: Ask) -> Row:
    """layer_norm and rms_norm: the last dims are normalised together; where one of them is sharded, the ranks share
    their statistics."""
    x, dims = argument(node, 0, "input"), argument(node, 1, "normalized_shape")
    lane, before = ask.need(x), len(shape(x)) - len(dims)
    if lane.dim < before:
        return row(node, lane, {x: lane})
    _refuse_bits(x)
    own = Sharded(lane.dim - before, lane.pieces)
    needs: dict[fx.Node, Spread] = {n: own for n in node.all_input_nodes if n is not x and is_tensor(n)}
    return row(node, lane, {**needs, x: lane}, STATISTICS)


def _refuse_bits(x: fx.Node) -> None:
    """A value of few states is better gathered as bits than what a norm makes of it."""
    if states_of(facts.get(x, Domain), facts.need(x, Value).dtype) is not None:
        raise Declined("it normalises over the sharded dim; its input travels as bits")


def normalize(node: fx.Node, ask: Ask) -> Row:
    """Division by the norm along one dim."""
    x, dim = argument(node, 0, "input"), argument(node, 2, "dim", 1)
    lane = ask.need(x)
    if lane.dim == dim % len(shape(x)):
        raise Declined("it normalises over the sharded dim")
    return row(node, lane, {x: lane})


def group_norm(node: fx.Node, ask: Ask) -> Row:
    """Whole groups of channels, whose number becomes local; with fewer groups than ranks these share statistics."""
    x, groups = argument(node, 0, "input"), argument(node, 1, "num_groups")
    lane = _channels(node, ask, x)
    own = (argument(node, 2, "weight"), argument(node, 3, "bias"))
    needs: dict[fx.Node, Spread] = {n: Sharded(0, lane.pieces) for n in own if isinstance(n, fx.Node)}
    if groups < ask.tp:
        _refuse_bits(x)
        return row(node, lane, {x: lane, **needs}, STATISTICS)
    divided(lane.pieces, shape(x)[1] // groups, "groups")
    return row(node, lane, {x: lane, **needs})


def instance_norm(node: fx.Node, ask: Ask) -> Row:
    """Statistics per sample and channel."""
    x = argument(node, 0, "input")
    lane = _channels(node, ask, x)
    needs = {n: Sharded(0, lane.pieces) for n in node.all_input_nodes if is_tensor(n) and len(shape(n)) == 1}
    return row(node, lane, {**needs, x: lane})


def _channels(node: fx.Node, ask: Ask, x: Any) -> Sharded:
    lane = ask.need(x)
    if lane.dim != 1:
        raise Declined("its channels are in dim 1, but its input is sharded in another")
    return lane


def prelu(node: fx.Node, ask: Ask) -> Row:
    """A slope for each channel, or one for all."""
    x, slope = argument(node, 0, "input"), argument(node, 1, "weight")
    lane = ask.need(x)
    if shape(slope) in ((), (1,)):
        return row(node, lane, {x: lane})
    if lane.dim != 1:
        raise Declined("its channels are in dim 1, but its input is sharded in another")
    return row(node, lane, {x: lane, slope: Sharded(0, lane.pieces)})


def shuffle(node: fx.Node, ask: Ask, *, up: bool) -> Row:
    """pixel_shuffle: r*r neighbouring channels become one; pixel_unshuffle the other way round."""
    x, factor = node.args[0], int(argument(node, 1, "upscale_factor" if up else "downscale_factor"))
    lane, rank = ask.need(x), len(shape(x))
    if lane.dim > rank - 3:
        raise Declined("it moves pixels of the sharded dim")
    if lane.dim < rank - 3:
        return row(node, lane, {x: lane})  # type: ignore[dict-item]
    block = factor * factor
    pieces = divided(lane.pieces, block, "blocks") if up else scaled(lane.pieces, block)
    return row(node, Sharded(lane.dim, pieces), {x: lane})  # type: ignore[dict-item]


def attention(node: fx.Node, ask: Ask) -> Row:
    """scaled_dot_product_attention: the three operands lie alike in a batch dim (heads); a mask may have that dim."""
    if argument(node, 4, "dropout_p", 0.0):
        raise Declined("its dropout is drawn inside the operation")
    operands = [argument(node, i, name) for i, name in enumerate(("query", "key", "value"))]
    lane = ask.need(next((n for n in operands if ask.lane(n) is not None), None))
    sizes = [shape(n) for n in operands]
    heads = {size[lane.dim] if lane.dim < len(size) - 2 else None for size in sizes}
    if len({len(size) for size in sizes}) != 1 or len(heads) != 1 or None in heads:
        raise Declined("attention is sharded over batch dims (heads) only")
    needs: dict[fx.Node, Spread] = dict.fromkeys(operands, lane)
    mask = argument(node, 3, "attn_mask")
    if isinstance(mask, fx.Node):
        own = lane.dim - len(sizes[0]) + len(shape(mask))
        if own >= 0 and shape(mask)[own] == sizes[0][lane.dim]:
            needs[mask] = Sharded(own, lane.pieces)
    return row(node, lane, needs)


def einsum(node: fx.Node, ask: Ask) -> Row:
    """A letter of the result may be sharded in every operand that has it."""
    terms = einsum_terms(node)
    if terms is None:
        raise Declined("its equation has a letter twice in one operand")
    operands = node.args[1:]
    source = next(n for n in operands if ask.lane(n) is not None)
    lane = ask.need(source)
    letter = terms[operands.index(source)][lane.dim]
    if letter not in terms[-1]:
        raise Declined("it sums over the sharded dim")
    if len(set(operands)) != len(operands):
        raise Declined("it multiplies a value with itself")
    needs: dict[fx.Node, Spread] = {
        n: Sharded(term.index(letter), lane.pieces)  # type: ignore[misc]
        for n, term in zip(operands, terms)
        if letter in term
    }
    return row(node, Sharded(terms[-1].index(letter), lane.pieces), needs)


def weight_norm(node: fx.Node, ask: Ask) -> Row:
    """A direction v and a length g for each slice of one dim, which is the one that may be sharded."""
    v, g, dim = node.args[0], node.args[1], argument(node, 2, "dim", 0)
    lane = ask.lane(v) or ask.need(g)
    if lane.dim != dim or dim == -1:
        raise Declined("its length is taken over the sharded dim")
    return row(node, lane, {v: lane, g: lane})  # type: ignore[dict-item]
