"""Time or depth: whether layers that are called again make the steps of a loop over time, or only share their weights.

A block that is called three times in a row and a loop over three steps look alike. What tells a step of time:

    the input    one value from outside (an input, or what a layer that is called once makes) is read at every step,
                 step 0 included: a static image, the frames of one tensor. By a layer: that a function is called twice
                 in a line says little
    fed back     the same, from step 1 on, beside what the step before made; of three steps or more, as the sum of a
                 block's input and output reads the block's first input once
    the state    a neuron layer is given the state that its call before left, or keeps it; or a spike reaches the next
                 spike's membrane through no layer, beside the membrane that it came from (a reset; the shortcut of a
                 block hands on the spike alone). Nothing enters that did not at step 0

Anything else is depth: nothing repeats but the weights. It is no loop then: it is left as it is, and may be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds

Sources = frozenset[fx.Node]
_LAYERS = ("conv", "linear", "norm", "leaf")
_LEAST = 3
"""Steps at which a value that is fed back beside another tells a loop from a sum."""


def is_time(graph: SpikeGraph, groups: Sequence[Sequence[fx.Node]], seeds: Mapping[fx.Node, int], length: int) -> bool:
    """Whether the groups, whose nodes `seeds` puts at `length` steps, are called by a loop over time."""
    direct, beside = _entering(graph, seeds, length)
    layers = any(kinds.kind_of(nodes[0]) != "surrogate" for nodes in groups)
    if layers and reduce(frozenset.intersection, direct):
        return True
    later = beside[1:]
    if length >= _LEAST and reduce(frozenset.intersection, later):
        return True
    nothing_new = all(sources <= beside[0] for sources in later)
    return nothing_new and any(_hands_on_state(nodes) for nodes in groups)


def _entering(graph: SpikeGraph, seeds: Mapping[fx.Node, int], length: int) -> tuple[list[Sources], list[Sources]]:
    """By step: the values from outside that its layers read, and those that they read of what the step before made
    together with values from outside."""
    steps: dict[fx.Node, int] = {}
    outside: dict[fx.Node, Sources] = {}
    direct, beside = ([Sources()] * length for _ in range(2))
    for node in graph.graph.nodes:
        read = [source for source in kinds.tensor_inputs(node) if source in outside]
        if node in seeds:
            step = steps[node] = seeds[node]
            outside[node] = Sources()
            free = [outside[source] for source in read if source not in steps]
            late = [outside[source] for source in read if steps.get(source, -1) >= step - 1]
            direct[step] = direct[step].union(*free)
            beside[step] = beside[step].union(*free, *late)
            continue
        made = [steps[source] for source in read if source in steps]
        if made:
            steps[node] = max(made)
        if _begins(node):
            outside[node] = Sources((node,))
        elif not _makes_nothing_of(node):
            late = [outside[source] for source in read if steps.get(source) in (None, steps.get(node))]
            outside[node] = Sources().union(*late)
    return direct, beside


def _begins(node: fx.Node) -> bool:
    """Where values come from: an input, a layer, a loop of its own."""
    return node.op == "placeholder" or kinds.kind_of(node) in _LAYERS or isinstance(node.target, Loop)


def _makes_nothing_of(node: fx.Node) -> bool:
    """The node's numbers are those of no operand: a tensor of the network's, zeros in the shape of another value."""
    name = kinds.name_of(node)
    return node.op == "get_attr" or kinds.kind_of(node) == "factory" or name in ("zeros_like", "ones_like", "full_like")


def _hands_on_state(nodes: Sequence[fx.Node]) -> bool:
    """Whether the calls of a group hand on neuron state, each to the next one."""
    kind = kinds.kind_of(nodes[0])
    if kind not in ("leaf", "surrogate"):
        return False
    if kind == "leaf" and len(nodes[0].args) == 1 and facts.get(nodes[0], Value) is not None:
        return True
    handed_on = all(before in _close_to(node) for before, node in zip(nodes, nodes[1:], strict=False))
    return handed_on and (kind == "leaf" or _keeps_membrane(*nodes[-2:]))


def _keeps_membrane(before: fx.Node, node: fx.Node) -> bool:
    """Whether a spike has something in common with what the one before was made of. (The last two are asked: the first
    membrane may be zeros or a learned number.)"""
    return any(_begins(item) or _spikes(item) for item in {*_close_to(before)} & {*_close_to(node)})


def _close_to(node: fx.Node) -> Iterator[fx.Node]:
    """The values that come to `node` through no layer and no other spike; to a neuron layer not as its first input."""
    first = 1 if kinds.kind_of(node) == "leaf" else 0
    waiting = [item for item in kinds.tensor_inputs(node) if item not in node.args[:first]]
    seen: set[fx.Node] = set()
    while waiting:
        item = waiting.pop()
        if item not in seen:
            seen.add(item)
            yield item
            if not (_begins(item) or _spikes(item) or _makes_nothing_of(item)):
                waiting += kinds.tensor_inputs(item)


def _spikes(node: fx.Node) -> bool:
    return kinds.kind_of(node) == "surrogate"
