"""A loop whose steps all read the same values (a static image, computed once) as one that goes through a sequence.

    loop T ((), (%x, %decay), %v)    ->    loop T ((%x expanded over T,), (%decay,), %v)

The two compute the same. The second has the form of a scan, which `fuse_neurons` knows: no copy is made, the kernel of
a fused neuron reads x once for all steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Value
from snnpart.graph import copied
from snnpart.ops_time import Loop


def with_sequence(scan: fx.Node) -> fx.Node:
    """A loop that is read in the place of `scan` and has its one value of a whole step as a sequence; `scan` itself
    where there is none. `scan` is left without readers."""
    loop, at = scan.target, _whole_step(scan)
    if not isinstance(loop, Loop) or loop.together or at is None:
        return scan
    fixed, carried = scan.args[1:]
    x, graph = fixed[at], scan.graph  # type: ignore[index]
    value = facts.need(x, Value)  # type: ignore[arg-type]
    with graph.inserting_before(scan):
        step = graph.call_function(torch.unsqueeze, (x, 0))
        sequence = graph.call_method("expand", (step, (loop.steps, *(-1,) * len(value.shape))))
        rest = (*fixed[:at], *fixed[at + 1 :])  # type: ignore[index, misc]
        made = graph.call_function(_taking(loop, at), ((sequence,), rest, carried))
    for node, times in ((step, 1), (sequence, loop.steps)):
        own = replace(value, shape=(times, *value.shape), slopes=(0, *value.slopes), stride=())
        facts.put(node, own, facts.origin(scan))
    made.meta = dict(scan.meta)
    scan.replace_all_uses_with(made)
    return made


def put_back(scan: fx.Node, made: fx.Node) -> None:
    """Have `scan` read again instead of what `with_sequence` made of it."""
    made.replace_all_uses_with(scan)
    sequence = made.args[0][0]  # type: ignore[index]
    for node in (made, sequence, sequence.args[0]):  # type: ignore[union-attr]
        scan.graph.erase_node(node)  # type: ignore[arg-type]


def _whole_step(scan: fx.Node) -> int | None:
    """Which of the fixed values is as large as a step's result; None unless there is one, and no sequence."""
    if not isinstance(scan.target, Loop) or scan.args[0] or len(scan.users) != 1:
        return None
    made = facts.get(next(iter(scan.users)), Value)
    fixed: Any = scan.args[1]
    values = [facts.get(item, Value) if isinstance(item, fx.Node) else None for item in fixed]
    found = [i for i, value in enumerate(values) if value is not None and made is not None and _is_step(value, made)]
    return found[0] if len(found) == 1 else None


def _is_step(value: Value, made: Value) -> bool:
    return value.numel > 1 and (1, *value.shape)[-len(made.shape) :] == (1, *made.shape[1:])


def _taking(loop: Loop, at: int) -> Loop:
    """The loop whose fixed value number `at` is what it is given of a sequence."""
    graphs = [copied(graph) for graph in loop.graphs]
    for graph in graphs:
        places = [node for node in graph.nodes if node.op == "placeholder"]
        places[0].prepend(places[at])
    return replace(loop, body=graphs[0], first=graphs[1] if len(graphs) > 1 else None)
