"""channels-last: images and sequences of convolutional regions lie in memory with their channels last.

On a GPU convolutions compute in that layout; given another they convert what they read and write at every call. The
pass says it once, in the graph: what a convolution reads is converted where it is not in that layout already, and
convolutions, norms, fused neurons, pooling, additions and views that merge or split the leading dims or the places hand
it on. So a region has one conversion at each entry, and no operation inside makes another (a test counts them).

torch makes what a convolution over sequences [N, C, L] reads contiguous, whatever its layout. It is therefore written
as one over images [N, C, 1, L].

Weights of convolutions over images are kept in the same order (`TensorSlice.channels_last`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import facts, ops, ops_layout, ops_time
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, Origin, Value
from snnpart.ops import Surrogate
from snnpart.ops_fused import FusedNeuron, splits_time
from snnpart.passes.analyze.kinds import VIEWS, kind_of, name_of

NAME = "channels-last"
_CONVOLUTIONS = (torch.conv2d, F.conv2d, torch.conv_transpose2d, F.conv_transpose2d)
_OVER_SEQUENCES = (torch.conv1d, F.conv1d)
_KEEPING = (ops.batch_norm, ops.batch_norm_copies, *ops_time.TIME_OPS, *ops.COLLECTIVES)


def channels_last(graphs: Sequence[fx.Graph], profile: MachineProfile) -> frozenset[str]:
    """Put the convolutional regions of a stage into channels-last, in the graphs of its tp ranks, in place; the weights
    that should lie so.

    The ranks must agree on what they send. Sizes say less on a rank with a single channel, where what is broadcast over
    channels looks like all others: the first rank's graph decides. Where a rank has no channels of a layer, and so
    other nodes, none is changed.
    """
    alike = len({len(graph.nodes) for graph in graphs}) == 1  # there are graphs, and they have the same nodes
    if not alike or any(node.target is ops.vacant for graph in graphs for node in graph.nodes):
        return frozenset()
    weights, decided = _laid_out(_Regions(graphs[0], profile))
    for graph in graphs[1:]:
        _laid_out(_Regions(graph, profile), decided)
    return weights


@dataclass(frozen=True)
class Copies:
    """Microseconds of a training step in which layouts are changed: inside convolutions of images that lie in the usual
    order, and with channels last."""

    usual: float
    last: float


def copies_of(graph: fx.Graph, profile: MachineProfile) -> Copies:
    """What changes of layout take in a graph of one's own, which this puts into channels-last.

    In the usual order a convolution converts what it reads and what it gives, and both gradients. With channels last
    there are the conversions at the entries of regions, and copies where a view merges channels with what is beside
    them or heads are multiplied.
    """
    convolutions = [n for n in graph.nodes if _convolves(n, _CONVOLUTIONS, 4) or _convolves(n, _OVER_SEQUENCES, 3)]
    regions = _Regions(graph, profile)
    usual = sum(regions.copy(item).us for node in convolutions for item in (node.args[0], node))
    _laid_out(regions)
    entries = sum(facts.need(node, Cost).us for node in graph.nodes if node.target is ops_layout.channels_last)
    left = sum(regions.copy(item).us for node in graph.nodes for item in _copied(node, regions.places))
    return Copies(usual, entries + left)


def _copied(node: fx.Node, places: dict[fx.Node, int]) -> list[fx.Node]:
    """What the operation copies because it lies with its channels last."""
    if node.target is ops_layout.matmul:
        return [item for item in node.all_input_nodes if _origin(item, places) in places]
    source: Any = node.args[0] if node.args else None
    value = facts.get(node, Value)
    if kind_of(node) != "view" or value is None or source not in places or node in places:
        return []
    given = facts.need(source, Value).shape
    channel = len(given) - 1 - places[source]
    kept = set(itertools.accumulate(value.shape, operator.mul, initial=1))
    stays = {math.prod(given[:channel]), math.prod(given[: channel + 1])} <= kept
    return [] if stays or node.target not in (torch.reshape, torch.flatten) else [source]


def _origin(node: fx.Node, places: dict[fx.Node, int]) -> fx.Node:
    """The value that lies with its channels last and that this one is a view of, else the first that is no view."""
    while node not in places and name_of(node) in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


Decided = list["int | None"]
"""For each node of a graph, in order, how many dims its result has behind its channels, if it lies with them last."""


def _laid_out(regions: _Regions, like: Decided | None = None) -> tuple[frozenset[str], Decided]:
    """One graph, as its own sizes say or as was decided for another rank's."""
    weights: set[str] = set()
    order = list(regions.graph.nodes)
    decided: Decided = []
    for place, node in enumerate(order):
        if _convolves(node, _OVER_SEQUENCES, 3):
            regions.enter_sequence(node)
        elif _convolves(node, _CONVOLUTIONS, 4):
            regions.enter(node)
            weights |= {str(item.target) for item in node.args[1:2] if isinstance(item, fx.Node) and _is_read(item)}
        elif _multiplies_stacks(node):
            node.target = ops_layout.matmul
        else:
            regions.see(node, _kept(node, regions.places) if like is None else like[place])
        decided.append(regions.places.get(node))
    return frozenset(weights), decided


@dataclass
class _Regions:
    """The values that lie with their channels last so far, with the number of dims behind their channels; values from
    outside as they were converted; and sequences as images."""

    graph: fx.Graph
    profile: MachineProfile
    places: dict[fx.Node, int] = field(default_factory=dict)
    converted: dict[fx.Node, fx.Node] = field(default_factory=dict)
    raised: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def see(self, node: fx.Node, places: int | None) -> None:
        """Note that the node's result lies so. A collective is told which dim lies last, as what it sends does."""
        if places is None:
            return
        self.places[node] = places
        if node.target in ops.COLLECTIVES:
            node.kwargs = {**node.kwargs, "last": len(facts.need(node, Value).shape) - 1 - places}

    def enter(self, convolution: fx.Node) -> None:
        """What the convolution over images reads and gives lies so."""
        source: Any = convolution.args[0]
        convolution.replace_input_with(source, self._lying(source, convolution))
        self.places[convolution] = 2

    def enter_sequence(self, node: fx.Node) -> None:
        """Write a convolution over sequences as one over images that are one place high."""
        x, weight, bias, stride, padding, dilation, groups = node.args
        value = facts.need(node, Value)
        behind = padding if isinstance(padding, str) else (0, *padding)  # type: ignore[misc]
        args = (self._image(x, node), self._image(weight, node), bias, (1, *stride), behind, (1, *dilation), groups)  # type: ignore[misc]
        image = _made(self.graph, node, torch.conv2d, args, _raised(value), node)
        flat = _made(self.graph, node, torch.squeeze, (image, 2), value, node, Cost())
        node.replace_all_uses_with(flat)
        self.graph.erase_node(node)
        self.enter(image)
        self.see(flat, _kept(flat, self.places))

    def _lying(self, source: fx.Node, at: fx.Node) -> fx.Node:
        """The value [N, C, ...] with its channels last, before `at`: one conversion for all that read it so. What is
        gathered is converted piece by piece, before it is, and an image of a sequence as that."""
        value = facts.need(source, Value)
        if self.places.get(source) == len(value.shape) - 2:
            return source
        if source in self.raised.values() or _only_gathered(source):
            given: Any = source.args[0]
            source.replace_input_with(given, self._lying(given, source))
            self.see(source, len(value.shape) - 2)
            return source
        if source not in self.converted:
            copy = self.copy(source)
            self.converted[source] = _made(self.graph, at, ops_layout.channels_last, (source,), value, source, copy)
            self.places[self.converted[source]] = len(value.shape) - 2
        elif at < self.converted[source]:
            at.prepend(self.converted[source])
        return self.converted[source]

    def copy(self, source: fx.Node) -> Cost:
        """Of a copy of the value, and of its gradient."""
        value = facts.need(source, Value)
        us, launch = self.profile.kernel_us(0.0, 2.0 * value.bytes), self.profile.launch_us
        back = us if value.requires_grad else 0.0
        return Cost(read=value.bytes, written=value.bytes, forward_us=us, backward_us=back, launch_us=launch)

    def _image(self, sequence: Any, at: fx.Node) -> fx.Node:
        if sequence not in self.raised:
            value = _raised(facts.need(sequence, Value))
            self.raised[sequence] = _made(self.graph, at, torch.unsqueeze, (sequence, 2), value, sequence, Cost())
            self.see(self.raised[sequence], _kept(self.raised[sequence], self.places))
        return self.raised[sequence]


def _made(
    graph: fx.Graph, at: fx.Node, target: Any, args: tuple[Any, ...], value: Value, like: fx.Node,
    cost: Cost | None = None,
) -> fx.Node:  # fmt: skip
    """A node of this pass before `at`, which gives `value`, costs so much, and has the other facts of `like`."""
    with graph.inserting_before(at):
        made = graph.call_function(target, args)
    made.meta = dict(like.meta)
    origin = facts.get(at, Origin) or Origin()
    facts.put(made, Origin(origin.module, origin.file, origin.line, NAME))
    facts.put(made, value)
    if cost is not None:
        facts.put(made, cost)
    return made


def _only_gathered(source: fx.Node) -> bool:
    """Whether it is a gather of channels that has one reader, which wants them last."""
    return source.target is ops.all_gather and len(source.users) == 1 and bool(source.args[2] == 1)


def _raised(value: Value) -> Value:
    """The value [N, C, L] as [N, C, 1, L]."""
    shape, slopes = ((*dims[:2], one, *dims[2:]) for dims, one in ((value.shape, 1), (value.slopes, 0)))
    return replace(value, shape=shape, slopes=slopes, stride=())


def _convolves(node: fx.Node, functions: tuple[Any, ...], dims: int) -> bool:
    value = facts.get(node, Value)
    return node.op == "call_function" and node.target in functions and value is not None and len(value.shape) == dims


def _multiplies_stacks(node: fx.Node) -> bool:
    """Whether it is the product of two stacks of as many matrices. Parts of a value with its channels last, as heads of
    attention are, do not lie as torch's products want them."""
    values = [facts.get(item, Value) if isinstance(item, fx.Node) else None for item in node.args]
    if node.target is not torch.matmul or len(values) != 2 or node.kwargs or None in values:
        return False
    one, other = (value.shape for value in values if value is not None)
    return len(one) > 3 and one[:-2] == other[:-2]


def _is_read(node: fx.Node) -> bool:
    return node.op == "get_attr"


def _kept(node: fx.Node, places: dict[fx.Node, int]) -> int | None:
    """How many dims a node's result has behind its channels, where it lies with them last because its inputs do."""
    value = facts.get(node, Value)
    if value is None or node.op not in ("call_function", "call_method"):
        return None
    first: Any = node.args[0] if node.args else None
    if splits_time(node) or node.target in _KEEPING or isinstance(node.target, FusedNeuron):
        return places.get(first)
    if kind_of(node) == "view":
        return _places_of_view(node, value, places)
    if kind_of(node) in ("elementwise", "pool", "join") or isinstance(node.target, Surrogate):
        return _places_of_all(node, value, places)
    return None


def _places_of_view(node: fx.Node, value: Value, places: dict[fx.Node, int]) -> int | None:
    """A view that merges or splits the places only, or puts a height of one before them or takes it away."""
    source: Any = node.args[0]
    given = facts.get(source, Value) if source in places else None
    if given is None:
        return None
    channel = len(given.shape) - 1 - places[source]
    behind = len(value.shape) - 1 - channel
    return behind if behind > 0 and value.shape[: channel + 1] == given.shape[: channel + 1] else None


def _places_of_all(node: fx.Node, value: Value, places: dict[fx.Node, int]) -> int | None:
    """Those of every input that is as large as the result, if there is one and they agree; a smaller one is broadcast.

    Pooling and joining give images with their channels last, and sequences contiguous."""
    pooled = kind_of(node) in ("pool", "join")
    found = {
        places.get(item)
        for item in node.all_input_nodes
        if (own := facts.get(item, Value)) is not None
        and (len(own.shape) == len(value.shape) if pooled else own.shape == value.shape)
    }
    only = found.pop() if len(found) == 1 else None
    return None if pooled and only != 2 else only
