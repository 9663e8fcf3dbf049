"""Runs the tp ranks of a stage side by side in one process, node by node, collectives computed jointly.

No process group is needed and autograd works through everything: each collective is one autograd function over the list
of the ranks' tensors, with the gradients that `snnpart.ops` states. All ranks' graphs have the same nodes in the same
order, which the dry run checks. A loop in rounds may hold collectives: its rounds run side by side too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from snnpart import bits, ops
from snnpart.compat import own_view
from snnpart.effects import is_random
from snnpart.facts import Pieces
from snnpart.graph import TRAINING, Body
from snnpart.ops_time import Loop, leaf_paths
from snnpart.scan import Scan, round_sizes

Ranks = tuple[Tensor, ...]


def join(parts: Sequence[Tensor], dim: int, pieces: Sequence[Pieces]) -> Tensor:
    """The whole value from what each rank holds of dim `dim`."""
    size = max((stop for own in pieces for _, stop in own), default=0)
    shape = (*parts[0].shape[:dim], size, *parts[0].shape[dim + 1 :])
    whole = parts[0].new_empty(shape)
    for part, own in zip(parts, pieces, strict=True):
        offset = 0
        for start, stop in own:
            whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
            offset += stop - start
    return whole


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Ranks:
        total = _sum(xs)
        return tuple(total.clone() for _ in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Ranks:
        return grads


class _GradAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Ranks:
        return tuple(map(own_view, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Ranks:
        total = _sum(grads)
        return tuple(total.clone() for _ in grads)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, pieces: Sequence[Pieces], states: Any, partial: bool, *xs: Tensor) -> Ranks:
        ctx.dim, ctx.pieces, ctx.partial = dim, pieces, partial
        whole = join([_through_bits(x, states) for x in xs], dim, pieces)
        return tuple(whole.clone() for _ in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        whole = [_sum(grads)] * len(grads) if ctx.partial else grads
        own = [ops.select_pieces(grad, ctx.dim, piece) for grad, piece in zip(whole, ctx.pieces, strict=True)]
        return (None, None, None, None, *own)


def _through_bits(x: Tensor, states: bits.States | None) -> Tensor:
    """x as it arrives when it travels as bits."""
    return x if states is None else bits.unpack(bits.pack(x, states), x.numel(), states, x.dtype).reshape(x.shape)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, pieces: Sequence[Pieces], *xs: Tensor) -> Ranks:
        ctx.dim, ctx.pieces = dim, pieces
        return tuple(ops.select_pieces(x, dim, own).clone() for x, own in zip(xs, pieces, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        whole = join(grads, ctx.dim, ctx.pieces)
        return (None, None, *(whole.clone() for _ in grads))


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, pieces: Sequence[Pieces], *xs: Tensor) -> Ranks:
        ctx.dim, ctx.pieces = dim, pieces
        total = _sum(xs)
        return tuple(ops.select_pieces(total, dim, own).clone() for own in pieces)

    backward = _Shard.backward


class _OneOfAll(torch.autograd.Function):
    """Rank 0's value of a replicated output; every rank receives its gradient."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.ranks = len(xs)
        return own_view(xs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Ranks:  # type: ignore[override]
        return tuple(grad.clone() for _ in range(ctx.ranks))


_WITHOUT_DIM: Mapping[Any, Any] = {ops.all_reduce: _AllReduce, ops.grad_all_reduce: _GradAllReduce}
_WITH_DIM: Mapping[Any, Any] = {ops.shard: _Shard, ops.reduce_scatter: _ReduceScatter}


def collective(node: fx.Node, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Carry out the collective `node` on what each rank holds."""
    if len(xs) == 1:
        return list(xs)
    if node.target in _WITHOUT_DIM:
        found: Sequence[Tensor] = _WITHOUT_DIM[node.target].apply(*xs)
    elif node.target is ops.all_gather:
        found = _AllGather.apply(node.args[2], node.args[3], *ops.gather_options(node), *xs)
    else:
        found = _WITH_DIM[node.target].apply(node.args[2], node.args[3], *xs)
    return found


def one_of_all(xs: Sequence[Tensor]) -> Tensor:
    """A replicated output as one tensor whose gradient reaches every rank."""
    found: Tensor = _OneOfAll.apply(*xs)
    return found


Observer = Callable[[fx.Node, int, Any], None]


class _Continuing:
    """A rank's body in a loop in rounds: the loops inside go on from round to round where they left off."""

    def __init__(self, body: nn.Module) -> None:
        self._body, self._states, self._at = body, dict[int, Any](), 0

    def begin(self) -> None:
        """A round begins: its loops come in the same order as before."""
        self._at = 0

    def get_submodule(self, path: str) -> nn.Module:
        return self._body.get_submodule(path)

    def bound(self, target: Any) -> Any:
        made = _bound(self._body, target)
        if not isinstance(made, Scan):
            return made
        place, self._at = self._at, self._at + 1

        def go_on(sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]) -> tuple[Tensor, ...]:
            results, self._states[place] = made.run(sequences, fixed, carried, self._states.get(place))
            return results

        return go_on


Owner = nn.Module | _Continuing
"""Who has the tensors and leaf copies that a graph names."""


def run_stage(
    graphs: Sequence[fx.Graph],
    bodies: Sequence[Owner],
    arguments: Sequence[Sequence[Any]],
    *,
    training: bool,
) -> list[tuple[Any, ...]]:
    """Run one stage on all tp ranks.

    Args:
        graphs: each rank's stage graph.
        bodies: each rank's tensors and leaf copies under the user's names.
        arguments: each rank's values of the placeholders, in order.

    Returns:
        Each rank's results.
    """
    ranks = range(len(graphs))
    values: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    waiting = [iter(own) for own in arguments]
    assigned = {node.args[0] for graph in graphs for node in graph.nodes if node.target is ops.assign}
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        if nodes[0].op == "output":
            return [_results(node, own) for node, own in zip(nodes, values)]
        if nodes[0].op == "placeholder":
            made: Sequence[Any] = [next(own) for own in waiting]
        elif nodes[0].op == "call_function" and nodes[0].target in ops.COLLECTIVES:
            made = collective(nodes[0], [_read(own[node.args[0]], node) for node, own in zip(nodes, values)])
        elif len(nodes) > 1 and isinstance(nodes[0].target, Loop) and nodes[0].target.together:
            made = _in_rounds(nodes, bodies, values, training)
        else:
            made = _each_rank(nodes, bodies, values, training, assigned)
        for rank in ranks:
            values[rank][nodes[rank]] = made[rank]
    raise AssertionError("a graph without output")


def _results(output: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    return tuple(map_arg(output.args[0], lambda node: _read(values[node], output)))  # type: ignore[arg-type]


def _each_rank(
    nodes: Sequence[fx.Node],
    bodies: Sequence[Owner],
    values: Sequence[Mapping[fx.Node, Any]],
    training: bool,
    assigned: set[Any],
) -> list[Any]:
    """One node on every rank. Random numbers are the same on each: what draws them is replicated (leaves may)."""
    draws = bool(leaf_paths(nodes[0])) or is_random(nodes[0])
    random = torch.get_rng_state() if len(nodes) > 1 and draws else None
    made = []
    for node, body, own in zip(nodes, bodies, values):
        if random is not None:
            torch.set_rng_state(random)
        made.append(_execute(node, body, own, training, copy=node in assigned))
    return made


def _execute(node: fx.Node, body: Owner, values: Mapping[fx.Node, Any], training: bool, *, copy: bool) -> Any:
    if node.op == "get_attr":
        if node.target == TRAINING:
            return training
        tensor = attribute(body, str(node.target))
        # A buffer that is assigned later keeps its old values for those who read it: they hold a copy.
        return _Assigned(tensor) if copy else tensor
    args = map_arg(node.args, lambda n: _read(values[n], node))
    kwargs = map_arg(node.kwargs, lambda n: _read(values[n], node))
    if node.op == "call_module":
        return body.get_submodule(str(node.target))(*args, **kwargs)  # type: ignore[misc]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)  # type: ignore[index]
    return _bound(body, node.target)(*args, **kwargs)


def _bound(body: Owner, target: Any) -> Any:
    return body.bound(target) if isinstance(body, (Body, _Continuing)) else target


def _in_rounds(
    nodes: Sequence[fx.Node], bodies: Sequence[Any], values: Sequence[Mapping[fx.Node, Any]], training: bool
) -> list[tuple[Tensor, ...]]:
    """A loop in rounds on every rank."""
    loops: list[Loop] = [node.target for node in nodes]  # type: ignore[misc]
    given: list[Any] = [
        map_arg(node.args, lambda n, own=own, node=node: _read(own[n], node))  # type: ignore[misc]
        for node, own in zip(nodes, values)
    ]
    sizes = round_sizes(loops[0])
    parts = [[sequence.split(sizes) for sequence in sequences] for sequences, _, _ in given]
    inside = [_Continuing(body) for body in bodies]
    rounds = []
    for at in range(len(sizes)):
        for one in inside:
            one.begin()
        graphs = [loop.body if at else loop.graphs[-1] for loop in loops]
        arguments = [[*(part[at] for part in own), *fixed] for own, (_, fixed, _) in zip(parts, given)]
        rounds.append(run_stage(graphs, inside, arguments, training=training))
    return [loops[0].joined_rounds(results) for results in zip(*rounds)]


class _Assigned:
    """A buffer that the graph assigns, and its values before that."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.before = buffer, buffer.clone()


def _read(value: Any, node: fx.Node) -> Any:
    if isinstance(value, _Assigned):
        return value.buffer if node.target is ops.assign else value.before
    return value


def attribute(body: Owner, dotted: str) -> Any:
    """A tensor of the body by its dotted name."""
    path, _, name = dotted.rpartition(".")
    return getattr(body.get_submodule(path), name)
