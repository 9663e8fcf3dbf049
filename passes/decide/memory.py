"""What a rank holds, as a linear function of the placement program's variables, and the bound on it.

With n ranks, f[t] = 4 bytes for a byte of a trained tensor t (itself, its gradient, the two moments of an optimizer
such as Adam), 1 for any other, and r the share of the largest rank (its pieces over the whole):

    sum_t  f[t] bytes(t) (1 - p[t] (1 - r))             p[t] <= x for every reader of t
  + sum_v  bytes(v) (w[v] + r l[v])                     w[v] >= 1 - x and l[v] >= x for every operation that keeps v
  + sum_o  own(o) (1 - x (1 - r))                       masks and membranes an operation keeps for itself

x is 1 where the operation reads (or, for what it makes, deals out) a slice: the sum of the y[g, rule] of such rules for
a matrix operation, s[c] for what follows in cluster c, 0 for anything else. Which values an operation keeps for
backward is said by `analyze-cost`; one that is kept both whole and as a slice counts twice, as it is held twice.

A weight that is computed from others counts as whole, and each term takes its own largest rank, so that the sum is
never less than what `analyze-cost` counts in the lowered program. Not in it: temporaries, workspaces of libraries, and
what the framework itself takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from snnpart import facts
from snnpart.facts import Cost, Sharded, Spread
from snnpart.footprint import MOMENTS
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph, TensorInfo
from snnpart.ops_time import Loop, leaf_paths
from snnpart.passes.analyze.cost import kept_values, own_saved, storage
from snnpart.passes.analyze.kinds import first_value
from snnpart.passes.decide.parts import is_tensor_read
from snnpart.passes.decide.rules import extent
from snnpart.passes.decide.rules_shape import value_bytes

if TYPE_CHECKING:
    from snnpart.passes.decide.placement_program import Builder

_Pick = Callable[[Sequence[Spread], Spread], Spread]

TRAINED_COPIES = 2 + MOMENTS
"""A parameter, its gradient, and an optimizer's two moments."""

Slicing = dict[int, float]
"""Variables whose sum says that a slice is read, each with the largest rank's share of the whole under it."""


class OverMemory(Exception):
    """No choice holds as little as was asked for; the least is `tensors` and `saved` bytes."""

    def __init__(self, tensors: float, saved: float) -> None:
        super().__init__(f"{tensors + saved:.0f} bytes")
        self.tensors, self.saved = tensors, saved


@dataclass
class Held:
    """Bytes of a rank: `constant` plus the sum of factor times variable."""

    constant: float = 0.0
    terms: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, size: float, slicing: Slicing) -> None:
        """`size` bytes that are a slice where `slicing` says so."""
        self.constant += size
        for variable, share in slicing.items():
            self.terms[variable] -= size * (1 - share)

    def plus(self, other: Held) -> Held:
        """Both together."""
        total = Held(self.constant + other.constant)
        for variable, factor in (*self.terms.items(), *other.terms.items()):
            total.terms[variable] += factor
        return total

    def at(self, solution: Sequence[float]) -> float:
        """The bytes under a solution."""
        return self.constant + sum(factor * solution[variable] for variable, factor in self.terms.items())


def bytes_of_rank(graph: SpikeGraph, build: Builder) -> tuple[Held, Held]:
    """What a rank holds of tensors with their copies, and of values saved for backward. Adds the variables p, w and l
    to the program under construction."""
    tensors, saved, reading = Held(), Held(), _Reading(build)
    for size, slicing in _tensors(graph, reading):
        tensors.add(size, slicing)
    for size, slicing in _own(graph, reading):
        saved.add(size, slicing)
    for node, keepers in _kept(graph, reading).items():
        _keep(float(value_bytes(node)), keepers, build, saved)
    return tensors, saved


@dataclass(frozen=True)
class _Reading:
    """How operations read and deal out, in variables."""

    build: Builder

    def of(self, node: fx.Node, at: int) -> Slicing:
        """When input `at` of an operation is a slice."""
        return self._slicing(node, lambda inputs, _: inputs[at])

    def result(self, node: fx.Node) -> Slicing:
        """When what an operation makes is a slice."""
        return self._slicing(node, lambda _, output: output)

    def _slicing(self, node: fx.Node, pick: _Pick) -> Slicing:
        found: Slicing = {}
        if node in self.build.group_of:
            group = self.build.group_of[node]
            for rule, rows in group.rows.items():
                row = rows[group.nodes.index(node)]
                found.update(_share(self.build.y[group][rule], pick(row.inputs, row.output)))
        elif node in self.build.lanes.rows:
            row = self.build.lanes.rows[node]
            found.update(_share(self.build.s[self.build.cluster_of[node]], pick(row.inputs, row.output)))
        return found


def _share(variable: int, spread: Spread) -> Slicing:
    if not isinstance(spread, Sharded):
        return {}
    sizes = [spread.size(rank) for rank in range(len(spread.pieces))]
    return {variable: max(sizes) / extent(spread.pieces)}


def _tensors(graph: SpikeGraph, reading: _Reading) -> Iterator[tuple[float, Slicing]]:
    """Bytes of each tensor with its copies, and when a rank has a slice of it: when all its readers want one."""
    readers: dict[str, list[Slicing]] = defaultdict(list)
    in_leaves = graph.in_leaves()
    for node in graph.graph.nodes:
        if is_tensor_read(node):
            readers[str(node.target)] += [reading.of(user, user.all_input_nodes.index(node)) for user in node.users]
        for path in leaf_paths(node):
            for name, sliced in _leaf_tensors(graph, path, in_leaves.get(path, {})):
                readers[name].append(reading.result(node) if sliced else {})
    for name, info in graph.tensors.items():
        yield held_bytes(info), _all(readers[name], reading.build)


def held_bytes(info: TensorInfo) -> float:
    """Bytes of a tensor in training: itself, and where it learns its gradient and the moments."""
    copies = TRAINED_COPIES if info.used and info.tensor.requires_grad else 1
    return float(copies * info.tensor.numel() * info.tensor.element_size())


def _leaf_tensors(graph: SpikeGraph, path: str, inside: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """The tensors inside a leaf, and whether they are cut with its channels."""
    dims = adapter_for(graph.leaves[path].module).channel_tensors(graph.leaves[path].module) or {}
    for name, own in inside.items():
        tensor, dim = graph.tensors[name].tensor, dims.get(own)
        yield name, dim is not None and tensor.dim() > dim and tensor.shape[dim] > 1


def _all(readers: list[Slicing], build: Builder) -> Slicing:
    """When all of the readers want a slice."""
    distinct = [dict(items) for items in {tuple(sorted(slicing.items())) for slicing in readers}]
    if len(distinct) <= 1 or not all(distinct):
        return distinct[0] if len(distinct) == 1 else {}
    together = build.program.variable()
    for slicing in distinct:
        build.program.constrain({together: 1.0, **dict.fromkeys(slicing, -1.0)}, high=0.0)
    return {together: max(share for slicing in distinct for share in slicing.values())}


def _own(graph: SpikeGraph, reading: _Reading) -> Iterator[tuple[float, Slicing]]:
    """Bytes that operations make for backward alone."""
    for node in graph.graph.nodes:
        cost, value = facts.get(node, Cost), first_value(node)
        if cost is not None and value is not None and cost.backward_us:
            size = cost.saved if isinstance(node.target, Loop) else own_saved(node, value)
            if size:
                yield size, reading.result(node)


def _kept(graph: SpikeGraph, reading: _Reading) -> Mapping[fx.Node, list[Slicing]]:
    """The values that operations keep for backward, and when each of these keeps a slice."""
    found: dict[fx.Node, list[Slicing]] = defaultdict(list)
    for node in graph.graph.nodes:
        cost = facts.get(node, Cost)
        if cost is None or not cost.backward_us or isinstance(node.target, Loop):
            continue
        inputs = node.all_input_nodes
        for item in kept_values(node):
            at = next((i for i, source in enumerate(inputs) if storage(source) is item), None)
            found[item].append(reading.result(node) if at is None else reading.of(node, at))
    return found


def _keep(size: float, keepers: list[Slicing], build: Builder, held: Held) -> None:
    """One value: whole where anyone keeps it whole, and a slice where anyone keeps that."""
    distinct = [dict(items) for items in {tuple(sorted(slicing.items())) for slicing in keepers}]
    if len(distinct) == 1:
        return held.add(size, distinct[0])
    whole, slice_ = build.program.variable(), build.program.variable()
    shares = [share for slicing in distinct for share in slicing.values()]
    for slicing in distinct:
        build.program.at_least(whole, dict.fromkeys(slicing, -1.0), 1.0)
        build.program.at_least(slice_, dict.fromkeys(slicing, 1.0))
    held.terms[whole] += size
    held.terms[slice_] += size * max(shares, default=0.0)


def mb(size: float) -> str:
    """Bytes as an error tells them: `1.5 MB`, from 1e9 on `1.5 GB`."""
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
