"""fold-rounds: a folded network takes k of its T steps at a time.

All steps in one call save the most calls, but their values may be more than the processor's cache holds. The nodes over
time become the body of one loop that takes k steps in each of its rounds; the loops inside carry neuron state from
round to round. What is equal at every step stays before it, what needs all steps (a mean over time) after it.

Done on a stage's graph, after all that looks into single nodes: placement, stages, fusion.

`region` finds the nodes. There is none where a layer takes all steps at once in its own way, or where the body would
draw random numbers in another order. A stage over tp ranks sends what it shares in every round; all its ranks must have
the same region (`regions`), or they would not meet.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from snnpart import effects, facts, ops, ops_norm
from snnpart.facts import Cost, Stage, TimeRole, Value, Values
from snnpart.ops_time import Keep, Loop, batch_norm_steps
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import argument

_FREE = frozenset({"elementwise", "conv", "linear", "pool", "surrogate"})
_BY_SAMPLE = frozenset({"view", "reduction", "index", "permute", "join", "norm", "matmul"})
_WHOLE_BATCH = frozenset({"batch_norm", "batch_norm_copies", "batch_norm_repeated", "instance_norm"})
_STATISTICS = frozenset({ops_norm.moments, ops_norm.channel_moments})
_OF_RANKS = frozenset({ops_norm.normalized, ops_norm.group_normalized, ops.vacant})
"""What takes k steps as it takes all: norms by statistics of all ranks, and zeros of the size of what is read."""


@dataclass(frozen=True)
class Region:
    """The nodes that run in rounds, in order, over `steps` steps, and what they read and others read of them."""

    steps: int
    nodes: tuple[fx.Node, ...]
    sequences: tuple[fx.Node, ...]
    fixed: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def region(graph: fx.Graph) -> Region | str:
    """The part of the graph that can run in rounds; the reason where there is none."""
    loops = [node for node in graph.nodes if isinstance(node.target, Loop)]
    lengths = {node.target.steps for node in loops}  # type: ignore[union-attr]
    if len(lengths) != 1 or any(node.target.together for node in loops):  # type: ignore[union-attr]
        return "there is no loop over time" if not lengths else "its loops have several lengths"
    (steps,) = lengths
    inside = _that_run(graph, steps)
    inside |= _only_at_first(graph, inside)
    late = _depends_outside(graph, inside)
    inside -= late
    left = next((node for node in graph.nodes if node not in inside and _must_run_inside(node, steps)), None)
    if left is not None:
        return f"{facts.place(left)} takes all steps at once"
    nodes = tuple(node for node in graph.nodes if node in inside)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    outputs = tuple(node for node in nodes if _is_read_outside(node, inside))
    return Region(
        steps,
        nodes,
        tuple(node for node in read if _over_time(node)),
        tuple(node for node in read if not _over_time(node)),
        outputs,
    )


def regions(graphs: Sequence[fx.Graph]) -> list[Region] | str:
    """The region of each tp rank's graph of one stage; the reason where there is none, or they are not the same one."""
    found: list[Region] = []
    for graph in graphs:
        own = region(graph)
        if isinstance(own, str):
            return own
        found.append(own)
    if len({(_names(own.nodes), _names(own.outputs)) for own in found}) > 1:
        return "its tp ranks, some of which have no channels in a layer, would take other operations together"
    sequences = dict.fromkeys(name for own in found for name in _names(own.sequences))
    fixed = dict.fromkeys(name for own in found for name in _names(own.fixed))
    return [_reading(own, graph, sequences, fixed) for own, graph in zip(found, graphs, strict=True)]


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _reading(own: Region, graph: fx.Graph, sequences: Iterable[str], fixed: Iterable[str]) -> Region:
    """The region with the inputs that any rank has: one without channels reads more, or in another order."""
    named = {node.name: node for node in graph.nodes}
    return replace(own, sequences=tuple(map(named.__getitem__, sequences)), fixed=tuple(map(named.__getitem__, fixed)))


def _over_time(node: fx.Node) -> bool:
    role = facts.get(node, TimeRole)
    return role is not None and role.dim == 0 and kinds.first_value(node) is not None


def _is_over(node: fx.Node) -> bool:
    """Whether the node's value, also one of statistics, has the steps somewhere."""
    role = facts.get(node, TimeRole)
    return role is not None and role.dim is not None and facts.get(node, Value) is not None


def _that_run(graph: fx.Graph, steps: int) -> set[fx.Node]:
    """The nodes that could run in rounds. A value that is there before them is sent whole, in one message."""
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        if _sends(node):
            runs = _source(node) in inside and _sends_steps(node)
        else:
            runs = _runs(node, steps)
        if runs:
            inside.add(node)
    return inside


def _sends(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in ops.COLLECTIVES


def _sends_steps(node: fx.Node) -> bool:
    """Whether what the ranks send of k steps' values is all that belongs to these steps."""
    if _source(node).target in _STATISTICS:
        return True
    return _over_time(node) and (len(node.args) < 3 or bool(node.args[2] != 0))


def _runs(node: fx.Node, steps: int) -> bool:
    """Whether the node computes, of k steps' values, those k steps' results."""
    if isinstance(node.target, Loop) or _is_result(node):
        return True
    if node.target in _STATISTICS:
        return _over_time(_source(node))
    if not _over_time(node) or node.op not in ("call_function", "call_method"):
        return False
    if effects.is_random(node) or kinds.name_of(node) in _WHOLE_BATCH:
        return False
    if node.target is batch_norm_steps:
        return bool(node.args[-1] == steps)
    if node.target in _OF_RANKS:
        return True
    return _between_forms(node, steps) or _keeps_form(node)


def _is_result(node: fx.Node) -> bool:
    """Whether the node takes a result of a loop: of all steps, or of the last one."""
    return node.target is operator.getitem and isinstance(_source(node).target, Loop)


def _only_at_first(graph: fx.Graph, inside: set[fx.Node]) -> set[fx.Node]:
    """Step 0's values, and what is computed of them, that loops read as they begin and never again: in later rounds
    they are those of the round's first step, and unread."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        takes_first = node.target is torch.select and node.args[0] in inside and tuple(node.args[1:]) == (0, 0)
        works = node.op in ("call_function", "call_method") and kinds.kind_of(node) == "elementwise"
        if takes_first or (works and any(s in found for s in node.all_input_nodes) and not effects.is_random(node)):
            found.add(node)
    unread = found
    while unread:
        unread = {node for node in found if not all(user in found or _begins(user, node) for user in node.users)}
        found -= unread
    return found


def _begins(loop: fx.Node, value: fx.Node) -> bool:
    """Whether a loop reads the value in its first step alone."""
    if not isinstance(loop.target, Loop) or value in loop.args[0]:  # type: ignore[operator]
        return False
    count = len(loop.args[0])  # type: ignore[arg-type]
    placeholders = [node for node in loop.target.body.nodes if node.op == "placeholder"]
    return not any(placeholders[count + i].users for i, one in enumerate(loop.args[1]) if one is value)  # type: ignore[arg-type]


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _between_forms(node: fx.Node, steps: int) -> bool:
    """A view between [T, N, ...] and [T*N, ...], or one value repeated T times."""
    if node.target is torch.flatten:
        return tuple(node.args[1:]) == (0, 1)
    if node.target is torch.unflatten:
        return bool(node.args[1] == 0) and tuple(node.args[2]) == (steps, -1)  # type: ignore[arg-type]
    sizes = node.args[1] if len(node.args) > 1 else None
    return node.target == "expand" and isinstance(sizes, tuple) and sizes[0] == steps


def _keeps_form(node: fx.Node) -> bool:
    """An operation that leaves dim 0 and what lies in it alone."""
    kind, own = kinds.kind_of(node), facts.need(node, TimeRole)
    first = next((source for source in node.all_input_nodes if _over_time(source)), None)
    role = None if first is None else facts.get(first, TimeRole)
    if role is None or (role.dim, role.merged) != (own.dim, own.merged):
        return False
    if kinds.name_of(node) == "reshape":
        sizes = argument(node, 1, "shape")
        return isinstance(sizes, tuple) and sizes[0] == -1
    return kind in _FREE or kind in _BY_SAMPLE


def _must_run_inside(node: fx.Node, steps: int) -> bool:
    """What would be left out of the rounds, though it is most of the work: loops, products, layers over time."""
    heavy = kinds.kind_of(node) in ("conv", "linear", "leaf", "norm") or isinstance(node.target, Loop)
    return heavy and _over_time(node)


def _depends_outside(graph: fx.Graph, inside: set[fx.Node]) -> set[fx.Node]:
    """Nodes that need one outside that needs one inside: they must come after all rounds."""
    after: set[fx.Node] = set()
    late: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if any(source in late or (source in after and source not in inside) for source in sources):
            late.add(node)
        if node in inside or any(source in inside or source in after for source in sources):
            after.add(node)
    return late & inside


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user not in inside for user in node.users) and not isinstance(node.target, Loop)


def in_rounds(graph: fx.Graph, found: Region, together: int) -> fx.Graph:
    """The graph with the region as one loop that takes `together` steps a round, and what is over in the first one."""
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    inside = set(found.nodes)
    after = _readers(graph, inside)
    for node in graph.nodes:
        if node not in inside and node not in after:
            _copy(new, node, made)
    _add_loop(new, found, together, made)
    for node in graph.nodes:
        if node in after:
            _copy(new, node, made)
    return new


def _readers(graph: fx.Graph, inside: set[fx.Node]) -> set[fx.Node]:
    after: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in inside and (
            node.op == "output" or any(source in inside or source in after for source in node.all_input_nodes)
        ):
            after.add(node)
    return after


def _copy(new: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    if node.op == "output":
        made[node] = new.output(map_arg(node.args[0], made.__getitem__))
        made[node].meta = dict(node.meta)
    else:
        made[node] = new.node_copy(node, made.__getitem__)


def _add_loop(new: fx.Graph, found: Region, together: int, made: dict[fx.Node, fx.Node]) -> None:
    keep: tuple[Keep, ...] = tuple("all" if _over_time(one) else "last" for one in found.outputs)
    over = found.steps % together
    first = _body(found, over) if over else None
    loop = Loop(_body(found, together), found.steps, keep, first, together)
    sequences = tuple(_stacked(new, made[node], node, found.steps) for node in found.sequences)
    node = new.call_function(loop, (sequences, tuple(made[one] for one in found.fixed), ()))
    values = tuple(
        _over(one, found.steps, found.steps, stacked=True) if _over_time(one) else facts.need(one, Value)
        for one in found.outputs
    )
    total = {
        name: sum(getattr(cost, name) for one in found.nodes if (cost := facts.get(one, Cost)) is not None)
        for name in Cost.__dataclass_fields__
    }
    facts.put(node, Values(values), Cost(**total), *_shared(found.nodes))
    for at, (one, value) in enumerate(zip(found.outputs, values, strict=True)):
        taken = new.call_function(operator.getitem, (node, at))
        taken.meta = dict(one.meta)
        facts.put(taken, value)
        made[one] = _merged(new, taken, one) if _over_time(one) and facts.need(one, TimeRole).merged else taken


def _shared(nodes: Sequence[fx.Node]) -> Iterable[Any]:
    """Facts of the whole loop, as its first node has them."""
    return [fact for kind in (facts.Origin, Stage, TimeRole) if (fact := facts.get(nodes[0], kind)) is not None]


def _body(found: Region, together: int) -> fx.Graph:
    """The region over `together` steps."""
    body = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(found.sequences):
        made[node] = body.placeholder(f"steps{at}")
        facts.put(made[node], _over(node, together, found.steps, stacked=True))
    for at, node in enumerate(found.fixed):
        made[node] = body.placeholder(f"fixed{at}")
        made[node].meta = dict(node.meta)
    for node in found.sequences:
        if facts.need(node, TimeRole).merged:
            made[node] = _merged(body, made[node], node, _over(node, together, found.steps))
    for node in found.nodes:
        made[node] = _shorter(body, node, together, found.steps, made)
    body.output(tuple(_stacked(body, made[node], node, together, found.steps) for node in found.outputs))
    return body


def _shorter(body: fx.Graph, node: fx.Node, together: int, steps: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """A copy of the node that takes `together` steps."""
    new = body.node_copy(node, made.__getitem__)
    if isinstance(node.target, Loop):
        new.target = replace(node.target, steps=together)
    elif node.target is batch_norm_steps:
        new.args = (*new.args[:-1], together)
    elif node.target is torch.unflatten:
        new.args = (new.args[0], 0, (together, -1))
    elif node.target == "expand":
        new.args = (new.args[0], (together, *new.args[1][1:]))  # type: ignore[index, misc]
    elif node.target is ops.vacant:
        new.args = (new.args[0], *_vacancy(node, together, steps), *new.args[4:])
    several = facts.get(node, Values)
    if several is not None and isinstance(node.target, Loop):
        facts.put(new, Values(tuple(_shape_over(value, together, steps) for value in several.items)))
    elif _is_over(node):
        facts.put(new, _over(node, together, steps))
    return new


def _vacancy(node: fx.Node, together: int, steps: int) -> tuple[Any, ...]:
    """Shape, slopes and reference of `ops.vacant` over so many steps."""
    tensors: Any = node.args[0]
    reference: Any = node.args[3]
    own = _over(node, together, steps)
    if reference is not None and _is_over(tensors[reference[0]]):
        position, dim, *_ = reference
        read = _over(tensors[position], together, steps)
        reference = (position, dim, read.shape[dim], read.slopes[dim])
    return own.shape, own.slopes, reference


def _shape_over(value: Any, together: int, steps: int) -> Any:
    """A loop's result of fewer steps; one of the last step is as it is."""
    if not isinstance(value, Value) or value.shape[:1] != (steps,) or value.slopes[0]:
        return value
    return replace(value, shape=(together, *value.shape[1:]), stride=())


def _over(node: fx.Node, together: int, steps: int, *, stacked: bool = False) -> Value:
    """The node's value over `together` steps, in the node's own form or stacked."""
    value, role = facts.need(node, Value), facts.need(node, TimeRole)
    dim = role.dim or 0
    before, after = slice(dim), slice(dim + 1, None)
    samples, slope = value.shape[dim] // steps, value.slopes[dim] // steps
    if not role.merged:
        sizes: tuple[int, ...] = (together,)
        grows: tuple[int, ...] = (0,)
    elif stacked:
        sizes, grows = (together, samples), (0, slope)
    else:
        sizes, grows = (together * samples,), (together * slope,)
    return replace(
        value,
        shape=(*value.shape[before], *sizes, *value.shape[after]),
        slopes=(*value.slopes[before], *grows, *value.slopes[after]),
        stride=(),
    )


def _stacked(graph: fx.Graph, made: fx.Node, node: fx.Node, together: int, steps: int | None = None) -> fx.Node:
    """The value as [together, N, ...]; that of the last step as it is."""
    if not _over_time(node) or not facts.need(node, TimeRole).merged:
        return made
    view = graph.call_function(torch.unflatten, (made, 0, (together, -1)))
    view.meta = dict(made.meta)
    facts.put(view, _over(node, together, steps or together, stacked=True), Cost())
    return view


def _merged(graph: fx.Graph, made: fx.Node, node: fx.Node, value: Value | None = None) -> fx.Node:
    """The value as [steps*N, ...]."""
    view = graph.call_function(torch.flatten, (made, 0, 1))
    view.meta = dict(node.meta)
    facts.put(view, value or facts.need(node, Value), Cost())
    return view
