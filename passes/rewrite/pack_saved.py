"""pack-saved: convolutions and linear layers keep spikes for backward as bits (`saved="packed"`, `ops_packed`).

Done on a stage's graph after all that looks at single operations. An operation is changed if its input holds few whole
numbers (`Domain`), and if a gradient of its weight is computed: nothing else keeps the input. A value that views, a
gather or a change of layout hand on is still the same numbers.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from snnpart import facts
from snnpart.bits import States, states_of
from snnpart.facts import Domain, Value
from snnpart.ops_packed import PackedInput
from snnpart.passes.analyze.kinds import VIEWS, kind_of, name_of

_HANDED_ON = VIEWS | {"contiguous", "channels_last", "grad_all_reduce", "all_gather", "shard"}


def pack_saved(graph: fx.Graph) -> None:
    """Have the operations of a training graph keep bits, in place."""
    for node in graph.nodes:
        states = _states(node)
        if states is not None:
            node.target = PackedInput(node.target, states)


def _states(node: fx.Node) -> States | None:
    """The states of what a layer reads and keeps; None where it is no such layer, or keeps something else."""
    if node.op != "call_function" or kind_of(node) not in ("conv", "linear") or len(node.args) < 2:
        return None
    x: Any = node.args[0]
    weight: Any = node.args[1]
    value, held = (facts.get(item, Value) if isinstance(item, fx.Node) else None for item in (x, weight))
    if value is None or held is None or not held.requires_grad:
        return None
    return states_of(_domain(x), value.dtype)


def _domain(x: fx.Node) -> Domain | None:
    while facts.get(x, Domain) is None and name_of(x) in _HANDED_ON and isinstance(x.args[0], fx.Node):
        x = x.args[0]
    return facts.get(x, Domain)
