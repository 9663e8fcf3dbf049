"""Makes one tp rank's graph from a graph with `Placement` facts.

Each node is copied with its arguments brought to the spread that its placement asks for. Where the producer's spread
differs, a collective over "tp" is put before the first reader of a stage and shared by the others there:

    P -> R   all_reduce, right after the producer (then a row-sharded layer's bias, once, on the whole sum)
    P -> S   reduce_scatter for the rule "scatter" (then the rank's part of the bias)
    S -> R   all_gather, as bits where the value's domain has few states and that is faster
    R -> S   shard
    R -> R   grad_all_reduce, where the reader gives each rank only its part of the gradient; behind an all_gather that
             no other reader uses, the two are one, whose backward is a reduce-scatter

Sizes that stand as numbers in the graph (a reshape's channels, the groups of a convolution) become local ones, and so
do the shapes in `Value` and the times in `Cost`. All ranks' graphs have the same nodes in the same order.
Numerics: sums over channels are ordered otherwise, so the tier is `reassociates`; one rank is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import map_arg

from snnpart import facts, ops
from snnpart.bits import gather_us
from snnpart.costs import MachineProfile
from snnpart.effects import is_random, writes_buffer
from snnpart.facts import (
    Cost,
    Domain,
    Origin,
    Partial,
    Placement,
    Replicated,
    Sharded,
    Spread,
    Stage,
    TimeRole,
    Value,
    Values,
)
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph
from snnpart.ops_time import leaf_paths
from snnpart.passes.analyze.cost import put_saved
from snnpart.passes.rewrite.local_sizes import local_arguments, local_value
from snnpart.passes.rewrite.shared_statistics import STATISTICS, is_group_norm, with_statistics
from snnpart.passes.rewrite.vacancies import can_be_vacant, put_known, vacant_node

R = Replicated()


@dataclass(frozen=True)
class ShardChannels:
    """Replaces the graph by that of tp rank `rank` of `tp`."""

    name: ClassVar[str] = "shard-channels"
    reads: ClassVar[tuple[type, ...]] = (Value, Placement)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "reassociates"

    tp: int
    rank: int
    profile: MachineProfile

    def run(self, graph: SpikeGraph) -> None:
        if self.tp > 1:
            graph.graph = _Rewrite(graph, self).run()


def shard_for_rank(graph: SpikeGraph, tp: int, rank: int, profile: MachineProfile) -> fx.Graph:
    """The graph that tp rank `rank` runs; for one rank it is the graph itself. `graph` stays as it is."""
    return _Rewrite(graph, ShardChannels(tp, rank, profile)).run() if tp > 1 else graph.graph


def twin(graph: SpikeGraph, rank: int) -> int:
    """The first tp rank whose shares all have the sizes of `rank`'s: the two run the same graph on other slices.

    A graph that keeps part of a random mask or of a group's statistics is the rank's alone.
    """
    if any(_names_pieces(node) for node in graph.graph.nodes):
        return rank
    spreads = {
        spread
        for node in graph.graph.nodes
        if (placement := facts.get(node, Placement)) is not None
        for spread in (placement.output, *placement.inputs)
        if isinstance(spread, Sharded)
    }
    return next(
        other for other in range(rank + 1) if all(spread.size(other) == spread.size(rank) for spread in spreads)
    )


def _names_pieces(node: fx.Node) -> bool:
    """Whether the rank's node says which channels are its own."""
    placement = facts.get(node, Placement)
    if placement is None or not isinstance(placement.output, Sharded):
        return placement is not None and isinstance(placement.output, Partial) and node.target is F.embedding
    return is_random(node) or (placement.rule == STATISTICS and is_group_norm(node))


@dataclass(frozen=True)
class LocalTensor:
    """How a tensor of the network lies on the tp ranks, and whether its gradient is a sum over them."""

    spread: Spread
    partial_gradient: bool = False


def local_tensors(graph: SpikeGraph) -> dict[str, LocalTensor]:
    """Tensors that are not simply whole on every rank, by name."""
    found: dict[str, LocalTensor] = {}
    in_leaves = graph.in_leaves()
    for node in graph.graph.nodes:
        placement = facts.get(node, Placement)
        if placement is None or not isinstance(placement.output, Sharded):
            continue
        if node.op == "get_attr":
            found[str(node.target)] = LocalTensor(placement.output)
        for path in leaf_paths(node):
            found.update(_leaf_tensors(graph, path, in_leaves.get(path, {}), placement.output))
    return found


def _leaf_tensors(graph: SpikeGraph, path: str, inside: Mapping[str, str], spread: Sharded) -> dict[str, LocalTensor]:
    """Tensors `inside` a sharded layer: those per channel are sliced, gradients of others are sums over ranks."""
    module = graph.leaves[path].module
    dims = adapter_for(module).channel_tensors(module) or {}
    channels = sum(spread.size(rank) for rank in range(len(spread.pieces)))
    found: dict[str, LocalTensor] = {}
    for name, own in inside.items():
        tensor, dim = graph.tensors[name].tensor, dims.get(own)
        sliced = dim is not None and tensor.dim() > dim and tensor.shape[dim] == channels
        found[name] = (
            LocalTensor(Sharded(dim, spread.pieces))
            if sliced and dim is not None
            else LocalTensor(R, tensor.requires_grad)
        )
    return found


class _Rewrite:
    """Builds the rank's graph node by node."""

    def __init__(self, graph: SpikeGraph, options: ShardChannels) -> None:
        self.source, self.options, self.kept = graph.graph, options, graph.kept
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, Spread, bool, int | None], fx.Node] = {}
        self.whole_readers = _whole_readers(graph.graph)
        self.last = max((s.index for n in self.source.nodes if (s := facts.get(n, Stage))), default=0)

    def run(self) -> fx.Graph:
        for node in self.source.nodes:
            if node.op == "output":
                self.graph.output(self._results(node.args[0])).meta = dict(node.meta)  # type: ignore[arg-type]
            else:
                self.made[node] = self._copy(node)
                self._forget_written(node)
        put_saved(self.graph)
        return self.graph

    def _results(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs whole, in the last stage, or in their own where they stay there."""
        answers, stay = flat[: len(flat) - self.kept], flat[len(flat) - self.kept :]
        whole = tuple(map_arg(answers, lambda n: self._bring(n, R, False, self.last)))  # type: ignore[arg-type]
        own = [(node, facts.get(node, Stage)) for node in stay]
        return (*whole, *(self._bring(node, R, False, stage.index if stage else None) for node, stage in own))

    def _forget_written(self, node: fx.Node) -> None:
        """What was gathered of a buffer is out of date once it is written."""
        if writes_buffer(node):
            self.converted = {key: new for key, new in self.converted.items() if key[0] not in node.all_input_nodes}

    def _copy(self, node: fx.Node) -> fx.Node:
        placement = facts.need(node, Placement)
        stage = facts.get(node, Stage)
        at = stage.index if stage else None
        inputs = {
            source: self._bring(source, spread, index in placement.partial_gradients, at)
            for index, (source, spread) in enumerate(zip(node.all_input_nodes, placement.inputs))
        }
        if isinstance(placement.output, Partial) or placement.rule == "scatter":
            return self._summed(node, inputs, placement.output)
        if is_random(node) and isinstance(placement.output, Sharded):
            return self._drawn(node, placement.output, inputs)
        if placement.rule == STATISTICS and isinstance(placement.output, Sharded):
            return self._with_statistics(node, placement.output, inputs)
        if self._idles(node, placement):
            return vacant_node(self.graph, node, placement.output, self.options.rank, inputs)
        args, kwargs = local_arguments(node, placement, self.options.rank)
        new = self.graph.create_node(
            node.op, node.target, map_arg(args, inputs.__getitem__), map_arg(kwargs, inputs.__getitem__), node.name
        )
        self._describe(new, node, placement.output, split=placement != _whole(placement))
        return new

    def _idles(self, node: fx.Node, placement: Placement) -> bool:
        """Whether the operation has nothing to do on this rank, and could fail on tensors without elements."""
        summed = isinstance(placement.output, Partial) or placement.rule == "scatter"
        data = 0 if summed else None  # what a layer reads stands before its weight and bias
        spread = placement.output if data is None else placement.inputs[data]
        return isinstance(spread, Sharded) and not spread.size(self.options.rank) and can_be_vacant(node)

    def _drawn(self, node: fx.Node, spread: Sharded, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
        """The rank's part of a mask or noise that every rank draws whole."""
        name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
        whole = facts.need(node, Value).shape[spread.dim]
        given = (name, spread.dim, whole, spread.pieces[self.options.rank], node.args[1:], dict(node.kwargs))
        new = self.graph.call_function(ops.drawn_slice, (inputs[node.args[0]], *map_arg(given, inputs.__getitem__)))  # type: ignore[index, misc]
        self._describe(new, node, spread, split=True)
        return new

    def _with_statistics(self, node: fx.Node, spread: Sharded, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
        """A norm over the sharded dim."""
        function, args = with_statistics(node, inputs, spread, self.options.rank, self.options.profile, self._add)
        new = self.graph.create_node("call_function", function, args, {}, node.name)
        self._describe(new, node, spread, split=True)
        return new

    def _summed(self, node: fx.Node, inputs: dict[fx.Node, fx.Node], output: Spread) -> fx.Node:
        """A row-sharded layer without its bias, the sum over ranks or the rank's share of it, and the bias."""
        if node.target is F.embedding:
            return self._looked_up(node, inputs)
        given: list[Any] = list(node.args)
        kwargs = {name: None if name == "bias" else value for name, value in node.kwargs.items()}
        bias = node.kwargs.get("bias")
        if node.target is not torch.einsum and len(given) > 2:
            bias, given[2] = given[2], None
        args = tuple(given)
        if self._idles(node, facts.need(node, Placement)):
            part = vacant_node(self.graph, node, R, self.options.rank, inputs)
        else:
            part = self.graph.create_node(
                node.op, node.target, map_arg(args, inputs.__getitem__), map_arg(kwargs, inputs.__getitem__), node.name
            )
            self._describe(part, node, R, split=True)
        function, rest = (ops.reduce_scatter, _lane(output)) if isinstance(output, Sharded) else (ops.all_reduce, ())
        spread = output if isinstance(output, Sharded) else R
        total = self._collective(node, function, part, rest, spread, facts.get(node, Stage))
        if not isinstance(bias, fx.Node):
            return total
        channels, rank = inputs[bias], self.options.rank
        if node.target is not F.linear:
            spatial = len(facts.need(node.args[1], Value).shape) - 2  # type: ignore[arg-type]
            column = _as_column(facts.need(channels, Value), spatial)
            channels = self._add(node, torch.reshape, (channels, (-1, *(1,) * spatial)), column)
        held = local_value(facts.need(node, Value), spread, rank)
        return self._add(node, torch.add, (total, channels), held, facts.get(node, TimeRole))

    def _looked_up(self, node: fx.Node, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
        """An embedding whose rows are dealt out: the rank's ids, and the sum over ranks."""
        ids, weight = node.args[0], node.args[1]
        table = facts.need(node, Placement).inputs[node.all_input_nodes.index(weight)]  # type: ignore[arg-type]
        assert isinstance(table, Sharded)  # the rule "row"
        padding = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx")
        args = (inputs[ids], inputs[weight], table.pieces[self.options.rank], padding)  # type: ignore[index]
        part = self.graph.create_node("call_function", ops.embedding_rows, args, {}, node.name)
        self._describe(part, node, R, split=False)
        return self._collective(node, ops.all_reduce, part, (), R, facts.get(node, Stage))

    def _bring(self, source: fx.Node, spread: Spread, partial: bool, stage: int | None) -> fx.Node:
        """The value of `source` in the given spread, converted at most once in a stage."""
        placed = facts.need(source, Placement).output
        have = R if isinstance(placed, Partial) else placed
        if have == spread and not partial:
            return self.made[source]
        key = (source, spread, partial, stage)
        if key not in self.converted:
            self.converted[key] = self._convert(source, have, spread, partial, stage)
        return self.converted[key]

    def _convert(self, source: fx.Node, have: Spread, want: Spread, partial: bool, stage: int | None) -> fx.Node:
        at = Stage(stage) if stage is not None else None
        if partial:
            if isinstance(have, Sharded) and (source, stage) not in self.whole_readers:
                return self._gathered(source, have, at, partial=True)
            return self._collective(source, ops.grad_all_reduce, self._bring(source, R, False, stage), (), R, at)
        if isinstance(have, Sharded) and have != want:
            if want != R:
                return self._collective(source, ops.shard, self._bring(source, R, False, stage), _lane(want), want, at)
            return self._gathered(source, have, at, partial=False)
        return self._collective(source, ops.shard, self.made[source], _lane(want), want, at)

    def _gathered(self, source: fx.Node, have: Sharded, at: Stage | None, *, partial: bool) -> fx.Node:
        value, profile = facts.need(source, Value), self.options.profile
        us, states = gather_us(profile, "tp", value, facts.get(source, Domain), self.options.tp)
        extra = (states, partial) if partial else (states,) if states is not None else ()
        new = self._collective(source, ops.all_gather, self.made[source], (*_lane(have), *extra), R, at)
        back = profile.reduce_scatter_us("tp", value.bytes, self.options.tp) if partial and value.requires_grad else 0.0
        facts.put(new, Cost(forward_us=us, backward_us=back))
        return new

    def _collective(
        self, source: fx.Node, function: Any, x: fx.Node, rest: tuple[Any, ...], spread: Spread, stage: Stage | None
    ) -> fx.Node:
        new = self.graph.call_function(function, (x, "tp", *rest))
        new.meta = {}
        value = facts.need(source, Value)
        made = Origin(
            facts.origin(source).module, facts.origin(source).file, facts.origin(source).line, "shard-channels"
        )
        facts.put(new, local_value(value, spread, self.options.rank), made, self._cost(function, value))
        put_known(new, stage, facts.get(source, TimeRole))
        return new

    def _cost(self, function: Any, value: Value) -> Cost:
        reduce = self.options.profile.all_reduce_us("tp", value.bytes, self.options.tp)
        gather = self.options.profile.all_gather_us("tp", value.bytes, self.options.tp)
        scatter = self.options.profile.reduce_scatter_us("tp", value.bytes, self.options.tp)
        forward = {ops.all_reduce: reduce, ops.reduce_scatter: scatter}.get(function, 0.0)
        moved = {ops.grad_all_reduce: reduce, ops.shard: gather, ops.reduce_scatter: gather}
        backward = moved.get(function, 0.0)
        return Cost(forward_us=forward, backward_us=backward if value.requires_grad else 0.0)

    def _add(
        self, source: fx.Node, function: Any, args: tuple[Any, ...], value: Value, time: TimeRole | None = None
    ) -> fx.Node:
        new = self.graph.call_function(function, args)
        origin = facts.origin(source)
        facts.put(new, value, Origin(origin.module, origin.file, origin.line, "shard-channels"))
        put_known(new, facts.get(source, Stage), time)
        return new

    def _describe(self, new: fx.Node, node: fx.Node, spread: Spread, *, split: bool) -> None:
        """The node's facts with local shapes and its share of the costs."""
        new.meta = dict(node.meta)
        rank = self.options.rank
        value, values, cost = facts.get(node, Value), facts.get(node, Values), facts.get(node, Cost)
        if value is not None:
            facts.put(new, local_value(value, spread, rank))
        if values is not None:
            facts.put(new, Values(_local_items(values.items, spread, rank)))
        if cost is not None and split:
            facts.put(new, cost.share(self.options.tp))


def _whole_readers(graph: fx.Graph) -> set[tuple[fx.Node, int | None]]:
    """(value, stage) pairs in which somebody needs the whole value, or other pieces of it, with its whole gradient."""
    last = max((s.index for n in graph.nodes if (s := facts.get(n, Stage))), default=0)
    found: set[tuple[fx.Node, int | None]] = set()
    for node in graph.nodes:
        placement, stage = facts.need(node, Placement), facts.get(node, Stage)
        at = last if node.op == "output" else stage.index if stage else None
        for index, (source, spread) in enumerate(zip(node.all_input_nodes, placement.inputs)):
            have = facts.need(source, Placement).output
            if spread != have and index not in placement.partial_gradients:
                found.add((source, at))
    return found


def _whole(placement: Placement) -> Placement:
    return Placement(placement.rule, R, (R,) * len(placement.inputs), placement.partial_gradients)


def _lane(spread: Spread) -> tuple[int, Any]:
    assert isinstance(spread, Sharded)
    return spread.dim, spread.pieces


def _as_column(own: Value, spatial: int) -> Value:
    return Value((*own.shape, *(1,) * spatial), own.dtype, (0,) * (1 + spatial), (), own.requires_grad)


def _local_items(items: Any, spread: Spread, rank: int) -> Any:
    if isinstance(items, Value):
        return local_value(items, spread, rank)
    if isinstance(items, Values):
        return Values(_local_items(items.items, spread, rank))
    if isinstance(items, tuple) and hasattr(items, "_fields"):
        return type(items)(*(_local_items(item, spread, rank) for item in items))
    if isinstance(items, (tuple, list)):
        return type(items)(_local_items(item, spread, rank) for item in items)
    return items
