"""Rows of convolutions and linears: the operations where channels are dealt out and summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart.facts import Partial, Sharded, Spread
from snnpart.passes.decide.rules import (
    Ask,
    Deal,
    Declined,
    R,
    Row,
    argument,
    divided,
    even,
    is_tensor,
    row,
    scaled,
    shape,
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a kind of matrix operation keeps its channels.

    `space` counts spatial dims; `columns` is the weight's dim of output channels, `rows` that of input channels,
    `groups` the position of the number of groups among the arguments.
    """

    space: int
    columns: int
    rows: int
    groups: int | None


MATRICES: Mapping[Any, Matrix] = {
    F.linear: Matrix(0, 0, 1, None),
    torch.conv1d: Matrix(1, 0, 1, 6),
    torch.conv2d: Matrix(2, 0, 1, 6),
    torch.conv3d: Matrix(3, 0, 1, 6),
    torch.conv_transpose1d: Matrix(1, 1, 0, 6),
    torch.conv_transpose2d: Matrix(2, 1, 0, 6),
    torch.conv_transpose3d: Matrix(3, 1, 0, 6),
}
_PRODUCT = Matrix(0, 1, 0, None)
"""`x @ W` with a weight of [in, out]."""
_HIDDEN = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def groups(node: fx.Node) -> int:
    kind = MATRICES.get(node.target, _PRODUCT)
    return 1 if kind.groups is None else int(argument(node, kind.groups, "groups", 1))


def is_matrix(node: fx.Node) -> bool:
    """True for an operation that deals out channels: a convolution or linear of one group, a product with a weight, an
    embedding."""
    if node.op != "call_function":
        return False
    if node.target in MATRICES:
        return groups(node) == 1
    return (
        node.target is F.embedding
        or (node.target in (torch.matmul, torch.mm) and _has_weight(node, 1))
        or (node.target is torch.einsum and _einsum_dims(node) is not None)
    )


def _has_weight(node: fx.Node, position: int) -> bool:
    """Whether the operand is a matrix of the network, and the other an activation."""
    weight = node.args[position] if len(node.args) > position else None
    return isinstance(weight, fx.Node) and weight.op == "get_attr" and is_tensor(weight) and len(shape(weight)) == 2


def _einsum_dims(node: fx.Node) -> tuple[int, int, int, int] | None:
    """For a product of an activation with a weight matrix over one shared letter: the weight's dims of output and
    input channels, the activation's dim of input channels, the result's dim of output channels."""
    terms = einsum_terms(node)
    if terms is None or len(terms) != 3 or not _has_weight(node, 2):
        return None
    x, weight, out = terms
    rows = [letter for letter in weight if letter in x and letter not in out]
    columns = [letter for letter in weight if letter in out and letter not in x]
    if len(rows) != 1 or len(columns) != 1:
        return None
    return weight.index(columns[0]), weight.index(rows[0]), x.index(rows[0]), out.index(columns[0])


def einsum_terms(node: fx.Node) -> list[str] | None:
    """The letters of each operand and of the result, of which upper-case ones are those of the dots; None where a
    letter stands twice in one operand."""
    given, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
    operands = given.split(",")
    if len(operands) != len(node.args) - 1:
        return None
    sizes = [len(shape(n)) - len(term.replace("...", "")) for term, n in zip(operands, node.args[1:])]
    if not arrow:
        once = sorted(letter for letter in set(given) - set(",.") if given.count(letter) == 1)
        result = ("..." if "..." in given else "") + "".join(once)
    most = max((size for term, size in zip(operands, sizes) if "..." in term), default=0)
    hidden = "".join(letter for letter in _HIDDEN if letter not in given)[:most]
    pairs = zip([*operands, result], [*sizes, most])
    terms = [term.replace("...", hidden[most - size :] if size else "") for term, size in pairs]
    return terms if all(len(set(term)) == len(term) for term in terms) else None


@dataclass(frozen=True, slots=True)
class _Parts:
    """Input, weight and bias of a matrix operation, the weight's dims, and the channel dims of input and result."""

    x: fx.Node
    weight: fx.Node
    bias: Any
    columns: int
    rows: int
    inward: int
    outward: int


def _parts(node: fx.Node) -> _Parts:
    if node.target is torch.einsum:
        dims = _einsum_dims(node)
        assert dims is not None  # `is_matrix` asked
        return _Parts(node.args[1], node.args[2], None, *dims)  # type: ignore[arg-type]
    kind = MATRICES.get(node.target, _PRODUCT)
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    if x is weight or not (is_tensor(x) and is_tensor(weight)):
        raise Declined("its weight is its input")
    dim = len(shape(x)) - kind.space - 1
    return _Parts(x, weight, bias, kind.columns, kind.rows, dim, dim)


def column(node: fx.Node, ask: Ask) -> Row:
    """Each rank computes its share of the output channels from the whole input."""
    deal = ask.deals.get(node, Deal())
    if node.target is F.embedding:
        return _embedding(node, ask, deal)
    parts = _parts(node)
    pieces = deal.pieces(shape(parts.weight)[parts.columns], ask.tp)
    needs: dict[fx.Node, Spread] = {parts.weight: Sharded(parts.columns, pieces)}
    if isinstance(parts.bias, fx.Node):
        needs[parts.bias] = Sharded(0, pieces)
    return row(node, Sharded(parts.outward, pieces), needs, "column")


def _embedding(node: fx.Node, ask: Ask, deal: Deal) -> Row:
    """Each rank looks up its share of the features."""
    ids, weight = node.args[0], node.args[1]
    if argument(node, 3, "max_norm") is not None:
        raise Declined("max_norm needs whole rows of it")
    pieces = deal.pieces(shape(weight)[1], ask.tp)
    return row(node, Sharded(len(shape(ids)), pieces), {weight: Sharded(1, pieces)}, "column")  # type: ignore[dict-item]


def _embedding_rows(node: fx.Node, ask: Ask) -> Row:
    """Each rank looks up the ids of its rows; the others give zeros, so that the sum is the whole."""
    weight = node.args[1]
    for position, name in ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse")):
        if argument(node, position, name):
            raise Declined(f"{name} needs all ids of a row")
    pieces = even(shape(weight)[0], ask.tp)
    needs: dict[fx.Node, Spread] = {weight: Sharded(0, pieces)}  # type: ignore[dict-item]
    return Row("row", Partial(), tuple(needs.get(n, R) for n in node.all_input_nodes))


def row_parallel(node: fx.Node, ask: Ask) -> Row:
    """Each rank computes what its share of the input channels adds to every output channel."""
    if node.target is F.embedding:
        return _embedding_rows(node, ask)
    parts = _parts(node)
    lane = ask.lane(parts.x)
    if lane is not None and lane.dim != parts.inward:
        raise Declined("its input is sharded in another dim than its channels")
    pieces = lane.pieces if lane else even(shape(parts.weight)[parts.rows], ask.tp)
    needs: dict[fx.Node, Spread] = {parts.x: Sharded(parts.inward, pieces), parts.weight: Sharded(parts.rows, pieces)}
    inputs = tuple(needs.get(n, R) for n in node.all_input_nodes)
    return Row("row", Partial(), inputs)


def scatter(node: fx.Node, ask: Ask) -> Row:
    """As by row, but each rank keeps only its share of the summed output channels."""
    if node.target is F.embedding:
        raise Declined("its features are dealt out by column")
    found = row_parallel(node, ask)
    parts, deal = _parts(node), ask.deals.get(node, Deal())
    pieces = deal.pieces(shape(parts.weight)[parts.columns], ask.tp)
    inputs = tuple(
        Sharded(0, pieces) if n is parts.bias else spread for n, spread in zip(node.all_input_nodes, found.inputs)
    )
    return Row("scatter", Sharded(parts.outward, pieces), inputs)


def data_of(node: fx.Node) -> Any:
    """The activation that a matrix operation reads."""
    return node.args[1] if node.target is torch.einsum else argument(node, 0, "input")


def weight_of(node: fx.Node) -> Any:
    """The weight that a matrix operation reads."""
    return node.args[2] if node.target is torch.einsum else argument(node, 1, "weight")


def grouped(node: fx.Node, ask: Ask) -> Row:
    """A grouped or depthwise convolution, cut at group borders."""
    parts, kind = _parts(node), MATRICES[node.target]
    x, weight, bias, dim = parts.x, parts.weight, parts.bias, parts.inward
    lane, count = ask.need(x), groups(node)
    if lane.dim != dim:
        raise Declined("its input is sharded in another dim than its channels")
    inner = shape(x)[dim] // count
    own = divided(lane.pieces, inner, "groups")
    outer = shape(weight)[0] // count if kind.columns == 0 else shape(weight)[1]
    produced = scaled(own, outer)
    needs: dict[fx.Node, Spread] = {x: lane, weight: Sharded(0, produced if kind.columns == 0 else lane.pieces)}
    if isinstance(bias, fx.Node):
        needs[bias] = Sharded(0, produced)
    return row(node, Sharded(dim, produced), needs, "group")
