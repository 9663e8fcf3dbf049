"""Rows of convolutions and linears: the operations where channels are dealt out and summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart.facts import Partial, Sharded, Spread
from snnpart.passes.decide.rules import Ask, Declined, R, Row, argument, divided, even, is_tensor, row, scaled, shape


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


def groups(node: fx.Node) -> int:
    kind = MATRICES[node.target]
    return 1 if kind.groups is None else int(argument(node, kind.groups, "groups", 1))


def is_matrix(node: fx.Node) -> bool:
    """True for a convolution or linear that deals out channels (one group)."""
    return node.op == "call_function" and node.target in MATRICES and groups(node) == 1


def _parts(node: fx.Node) -> tuple[Matrix, fx.Node, fx.Node, Any, int]:
    """Kind, input, weight, bias and the channel dim of input and output."""
    kind = MATRICES[node.target]
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    if x is weight or not (is_tensor(x) and is_tensor(weight)):
        raise Declined("its weight is its input")
    return kind, x, weight, bias, len(shape(x)) - kind.space - 1


def column(node: fx.Node, ask: Ask) -> Row:
    """Each rank computes its share of the output channels from the whole input."""
    kind, x, weight, bias, dim = _parts(node)
    pieces = even(shape(weight)[kind.columns], ask.tp)
    needs: dict[fx.Node, Spread] = {weight: Sharded(kind.columns, pieces)}
    if isinstance(bias, fx.Node):
        needs[bias] = Sharded(0, pieces)
    return row(node, Sharded(dim, pieces), needs, "column")


def row_parallel(node: fx.Node, ask: Ask) -> Row:
    """Each rank computes what its share of the input channels adds to every output channel."""
    kind, x, weight, _, dim = _parts(node)
    lane = ask.lane(x)
    if lane is not None and lane.dim != dim:
        raise Declined("its input is sharded in another dim than its channels")
    pieces = lane.pieces if lane else even(shape(weight)[kind.rows], ask.tp)
    needs: dict[fx.Node, Spread] = {x: Sharded(dim, pieces), weight: Sharded(kind.rows, pieces)}
    inputs = tuple(needs.get(n, R) for n in node.all_input_nodes)
    return Row("row", Partial(), inputs)


def grouped(node: fx.Node, ask: Ask) -> Row:
    """A grouped or depthwise convolution, cut at group borders."""
    kind, x, weight, bias, dim = _parts(node)
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
