"""measured-times: measured times of kernels in the place of the roofline's.

A profile may hold the times of operations as they ran on the machine (`snnpart.measure`), by their text: the
operation, what it reads (dtype, shape, whether a gradient goes back) and its literals, without the user's names, so
that equal layers share one entry. An operation that was not measured (another batch, a layer that is new) takes the
roofline's time, scaled by what the measured operations of its kind were off by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2s
from typing import Any, ClassVar, Literal

from torch import fx

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, State, Value
from snnpart.graph import SpikeGraph
from snnpart.ops import Surrogate
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds


def key_of(node: fx.Node, graph: SpikeGraph) -> str:
    """The operation of a node as text."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _operand)
    return f"{_operation(node, graph)}{args}{kwargs or ''}"


def _operand(node: fx.Node) -> Any:
    value = kinds.first_value(node)
    if value is None:
        return _Text(kinds.name_of(node) if node.op == "get_attr" else "number")
    dtype = str(value.dtype).removeprefix("torch.")
    return _Text(f"{dtype}{list(value.shape)}{' grad' if value.requires_grad else ''}")


class _Text(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _operation(node: fx.Node, graph: SpikeGraph) -> str:
    target: Any = node.target
    if node.op == "call_module":
        module = graph.leaves[target].module
        return f"{type(module).__module__}.{' '.join(repr(module).split())}"
    if isinstance(target, Loop):
        inside = "\n".join(key_of(inner, graph) for inner in target.nodes() if inner.op.startswith("call"))
        return f"loop {target.steps} {blake2s(inside.encode(), digest_size=8).hexdigest()}"
    if isinstance(target, Surrogate):
        return f"{target.function.__module__}.{target.function.__qualname__}"
    return kinds.name_of(node) or f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


@dataclass(frozen=True)
class MeasuredTimes:
    """Replaces the times in `Cost` by what the profile measured. Layers are measured as they are: a neuron that `fused`
    says will run in fused kernels keeps the roofline's time."""

    name: ClassVar[str] = "measured-times"
    reads: ClassVar[tuple[type, ...]] = (Value, State, Cost)
    writes: ClassVar[tuple[type, ...]] = (Cost,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    profile: MachineProfile
    fused: Callable[[fx.Node], bool] | None = None

    def run(self, graph: SpikeGraph) -> None:
        for node in graph.graph.nodes:
            cost = facts.get(node, Cost)
            if cost is not None and not (self.fused is not None and self.fused(node)):
                there, back = self.profile.scales.get(kinds.kind_of(node), (1.0, 1.0))
                scaled = (there * cost.forward_us, back * cost.backward_us)
                forward, backward = self.profile.kernels.get(key_of(node, graph), scaled)
                facts.put(node, replace(cost, forward_us=forward, backward_us=backward))


def scales_of(graph: SpikeGraph, kernels: Mapping[str, tuple[float, float]]) -> Mapping[str, tuple[float, float]]:
    """By kind: how many times longer measured operations took than their `Cost` says, forward and backward, all
    together."""
    measured: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    predicted: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for node in graph.graph.nodes:
        cost, times = facts.get(node, Cost), kernels.get(key_of(node, graph))
        if cost is not None and times is not None:
            for way, (took, said) in enumerate(zip(times, (cost.forward_us, cost.backward_us), strict=True)):
                measured[kinds.kind_of(node)][way] += took
                predicted[kinds.kind_of(node)][way] += said
    ratio = lambda took, said: took / said if took and said else 1.0  # noqa: E731
    return {
        kind: (ratio(took[0], predicted[kind][0]), ratio(took[1], predicted[kind][1]))
        for kind, took in measured.items()
    }
