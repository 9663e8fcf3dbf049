"""analyze-cost: what every node computes, moves and keeps, and how long that takes on a machine.

Counted at the example batch. flops: 2 for a multiply-add. read and written: each operand and each result once. saved:
bytes that autograd keeps from forward for backward, each value counted where it is saved first. A multi-step neuron
runs its element-wise operations T times, one launch each, or where it is to run fused all in one; a view costs
nothing. Backward of a product needs one product for each operand that requires grad; other operations need about what
forward needs.

A loop costs its body T times. Time is the profile's roofline: launches + max(flops / rate, bytes / copy rate).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import fx

from snnpart import facts, ops_pool
from snnpart.bits import packed_bytes
from snnpart.costs import MachineProfile, default_profile
from snnpart.facts import Cost, LeafMemory, State, Value, Values
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph
from snnpart.ops_fused import FusedNeuron, input_place, is_expansion, kept_states, result_nodes, scan_input
from snnpart.ops_packed import PackedInput
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import first_value, name_of, value_of
from snnpart.passes.analyze.leaf_memory import put_leaf_memory

_SAVES_INPUT = frozenset({"conv", "linear", "matmul", "norm", "surrogate", "pool"})
_SAVES_BOTH = frozenset({"mul", "div", "pow", "maximum", "minimum", "where"})
_SAVES_RESULT = frozenset({"relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal", "softmax", "log_softmax"})
_SAVES_MASK = frozenset({"dropout", "clamp", "abs", "hardtanh", "relu6"})
_ALIASES = kinds.VIEWS | {"grad_all_reduce"}


@dataclass(frozen=True)
class AnalyzeCost:
    """Writes `Cost` on every node that makes a tensor; `profile` None means the default machine profile. `fused` says
    of a node whether it is a neuron that will run in fused kernels."""

    name: ClassVar[str] = "analyze-cost"
    reads: ClassVar[tuple[type, ...]] = (Value, State)
    writes: ClassVar[tuple[type, ...]] = (Cost, LeafMemory)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    profile: MachineProfile | None = None
    fused: Callable[[fx.Node], bool] | None = None

    def run(self, graph: SpikeGraph) -> None:
        profile = self.profile or default_profile()
        weights = _leaf_weights(graph)
        kept: set[fx.Node] = set()
        put_leaf_memory(graph)
        for node in graph.graph.nodes:
            value = first_value(node)
            if node.op != "output" and value is not None:
                count = _Counting(graph, weights, profile, kept)
                cost = _loop_cost(node, node.target, count) if isinstance(node.target, Loop) else count(node)
                fused = self.fused is not None and self.fused(node)
                facts.put(node, _fused(cost, node, profile) if fused else cost)


@dataclass(frozen=True)
class _Counting:
    """Counts nodes one by one; `kept` are the values that earlier ones keep for backward."""

    graph: SpikeGraph
    weights: Counter[str]
    profile: MachineProfile
    kept: set[fx.Node]

    def __call__(self, node: fx.Node) -> Cost:
        value = first_value(node)
        if value is None:
            return Cost()
        is_leaf = node.op == "call_module"
        work = _leaf_work(node, value, self.graph, self.weights) if is_leaf else _work(node, value)
        return _cost(node, value, work, self.profile, self.kept)


def _loop_cost(node: fx.Node, loop: Loop, count: _Counting) -> Cost:
    """An ordinary step's costs T times, and a copy of each result that is kept of all steps."""
    inside = [count(inner) for inner in loop.body.nodes if inner.op != "output"]
    total = {name: loop.steps * sum(getattr(cost, name) for cost in inside) for name in Cost.__dataclass_fields__}
    copied, value = result_bytes(node), first_value(node)
    assert value is not None  # asked for nodes that make a tensor
    copying = count.profile.kernel_us(0.0, 2 * copied, value.dtype)
    total["read"] += copied
    total["written"] += copied
    total["forward_us"] += copying
    total["backward_us"] += copying if value.requires_grad else 0.0
    return Cost(**total)


def _fused(cost: Cost, node: fx.Node, profile: MachineProfile) -> Cost:
    """The cost of a neuron that is to run fused, before it is; what it saves is counted as if it were not."""
    made = facts.need((result_nodes(node) or [node])[-1], Value)
    sequence: Any = scan_input(node)
    x = result_bytes(sequence.args[0] if is_expansion(sequence) else sequence)
    return replace(in_fused_kernels([cost], x, made, profile), saved=cost.saved)


def in_fused_kernels(
    costs: Sequence[Cost], x: float, made: Value, profile: MachineProfile, *, residual: float = 0.0, sums: bool = False
) -> Cost:
    """What operations of these costs take as one fused neuron, which keeps x (bytes) for backward where they keep any.

    Forward reads x and the residual and writes the result; backward reads x and the result's gradient, and writes x's.
    With `sums`, of a norm with the batch's statistics, kernels that read the same and leave sums over channels, which
    one more adds up, run before each. Parameters are a number, or one for each channel: nothing.
    """
    flops, back = sum(cost.flops for cost in costs), sum(cost.backward_flops for cost in costs)
    learns, launching = any(cost.backward_us for cost in costs), profile.launch_us * (3 if sums else 1)
    reading, pulling = x + residual + made.bytes, 2 * x + made.bytes
    running = profile.kernel_us(flops, reading + sums * x, made.dtype) - profile.launch_us
    pulled = profile.kernel_us(back, pulling + sums * (x + made.bytes), made.dtype) - profile.launch_us
    return Cost(
        flops=flops,
        read=x + residual,
        written=made.bytes,
        saved=x if any(cost.saved for cost in costs) else 0.0,
        backward_flops=back,
        forward_us=launching + running,
        backward_us=launching + pulled if learns else 0.0,
        launch_us=launching,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What forward does: flops, bytes read and written, kernel launches."""

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0
    launches: float = 0.0


def _cost(node: fx.Node, value: Value, work: _Work, profile: MachineProfile, kept: set[fx.Node]) -> Cost:
    if not work.launches:
        return Cost()
    grads = _gradients(node, value)
    launching = work.launches * profile.launch_us
    running = profile.kernel_us(work.flops, work.read + work.written, value.dtype) - profile.launch_us
    return Cost(
        flops=work.flops,
        read=work.read,
        written=work.written,
        saved=_saved(node, value, kept) if grads else 0.0,
        backward_flops=work.flops * grads,
        forward_us=launching + running,
        backward_us=launching + running * grads if grads else 0.0,
        launch_us=launching,
    )


def _work(node: fx.Node, value: Value) -> _Work:
    idle = node.op in ("placeholder", "get_attr") or name_of(node) in kinds.VIEWS or isinstance(node.target, type)
    read = sum(result_bytes(item) for item in kinds.tensor_inputs(node))
    return _Work() if idle else _Work(operation_flops(node, value), read, result_bytes(node), 1.0)


def product_flops(node: fx.Node, graph: SpikeGraph) -> float:
    """flops of the products with a weight in forward: a convolution's or linear's, those in a cell or a loop."""
    value = first_value(node)
    if isinstance(node.target, Loop):
        calls = node.target.steps / (node.target.together or 1)
        return calls * sum(product_flops(inner, graph) for inner in node.target.body.nodes)
    if value is None or node.op == "output":
        return 0.0
    if node.op == "call_module":
        return 2.0 * _rows(value) * _leaf_weights(graph)[str(node.target)]
    return operation_flops(node, value) if kinds.kind_of(node) in ("conv", "linear") else 0.0


def _leaf_weights(graph: SpikeGraph) -> Counter[str]:
    """Elements of the weight matrices that each leaf holds."""
    found: Counter[str] = Counter()
    for info in graph.tensors.values():
        if info.leaf is not None and info.tensor.dim() > 1:
            found[info.leaf] += info.tensor.numel()
    return found


def _leaf_work(node: fx.Node, value: Value, graph: SpikeGraph, weights: Counter[str]) -> _Work:
    """Element-wise operations at every step, and a product with each weight matrix the layer holds."""
    launches, per_element = _steps(node, graph)
    read = per_element * sum(result_bytes(item) for item in kinds.tensor_inputs(node))
    flops = per_element * value.numel + 2.0 * _rows(value) * weights[str(node.target)]
    return _Work(flops, read, per_element * result_bytes(node), launches)


def _rows(value: Value) -> float:
    """How many vectors of channels meet a weight matrix."""
    return value.numel / max(value.shape[1], 1) if len(value.shape) > 1 else 1


def _steps(node: fx.Node, graph: SpikeGraph) -> tuple[float, float]:
    """Kernel launches of a leaf's call, and element-wise operations for each element."""
    module = graph.leaves[str(node.target)].module
    adapter = adapter_for(module)
    per_element, dim = max(adapter.flops_per_element(module), 1.0), adapter.time_dim(module)
    value = first_value(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    steps = value.shape[dim] if value is not None and dim is not None and dim < len(value.shape) else 1
    return steps * per_element, per_element


def operation_flops(node: fx.Node, value: Value) -> float:
    """flops of one operation's forward: two for a multiply-add, eight an element of a norm, else one."""
    kind = kinds.kind_of(node)
    if kind == "conv":
        return _convolution_flops(node, value)
    if kinds.name_of(node) == "scaled_dot_product_attention":
        return _attention_flops(node, value)
    if kind in ("linear", "matmul"):
        left = value_of(node.args[0])
        return 2.0 * value.numel * (left.shape[-1] if left is not None and left.shape else 1)
    if kind == "norm":
        return 8.0 * value.numel
    inputs = [first_value(item) for item in kinds.tensor_inputs(node)]
    return float(max([value.numel, *(item.numel for item in inputs if item is not None)]))


def _convolution_flops(node: fx.Node, value: Value) -> float:
    """Two for each weight that meets an output element (for a transposed one: an input element)."""
    source, weight = value_of(node.args[0]), value_of(kinds.argument(node, 1, "weight"))
    if source is None or weight is None:
        return 0.0
    elements = source.numel if "transpose" in name_of(node) else value.numel
    return 2.0 * elements * math.prod(weight.shape[1:])


def _attention_flops(node: fx.Node, value: Value) -> float:
    """Queries [.., L, E] by keys [.., S, E], and the weights [.., L, S] by the values."""
    queries, keys = value_of(node.args[0]), value_of(node.args[1])
    if queries is None or keys is None:
        return 0.0
    return 2.0 * keys.shape[-2] * (queries.numel + value.numel)


def _gradients(node: fx.Node, value: Value) -> int:
    """How many gradients backward computes: of each operand of a product that needs one, else one or none."""
    if not value.requires_grad:
        return 0
    if kinds.kind_of(node) not in ("conv", "linear", "matmul"):
        return 1
    operands = [value_of(item) for item in node.args[:2]]
    return max(1, sum(item is not None and item.requires_grad for item in operands))


def result_bytes(node: fx.Node) -> float:
    """Bytes of a node's results."""
    value, several = facts.get(node, Value), facts.get(node, Values)
    if value is not None:
        return float(value.bytes)
    return float(sum(item.bytes for item in several.items if isinstance(item, Value))) if several is not None else 0.0


def _saved(node: fx.Node, value: Value, kept: set[fx.Node]) -> float:
    """Bytes of values that this node is the first to keep; those of parameters are not counted."""
    fresh = [item for item in kept_values(node) if item not in kept]
    kept.update(fresh)
    return own_saved(node, value) + sum(result_bytes(item) for item in fresh)


def own_saved(node: fx.Node, value: Value) -> float:
    """Bytes that the node makes for backward alone: masks, places of maxima, membranes."""
    name = name_of(node)
    if isinstance(node.target, PackedInput):
        given = value_of(node.args[0])
        return 0.0 if given is None else float(packed_bytes(given.numel, node.target.states[1]))
    if isinstance(node.target, FusedNeuron):
        return kept_states(node.target, value)
    if name in _SAVES_MASK:
        return float(value.numel)
    if kinds.kind_of(node) == "leaf":
        return memory_of_leaf(node).own * value.bytes
    if node.target is ops_pool.max_pool2d:
        return float(value.numel)
    return 8.0 * value.numel * name.startswith("max_pool")


def memory_of_leaf(node: fx.Node) -> LeafMemory:
    """What the call of a layer holds, as it was found, or as most neurons do."""
    return facts.get(node, LeafMemory) or LeafMemory()


def kept_values(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values, each by the node whose memory it is, that autograd keeps for the backward of `node`."""
    name = name_of(node)
    keeps: list[fx.Node] = []
    if isinstance(node.target, FusedNeuron):
        keeps = [node.args[input_place(node.target)]]  # type: ignore[list-item]
    elif isinstance(node.target, PackedInput):
        keeps = kinds.tensor_inputs(node)[1:]
    elif node.target is ops_pool.max_pool2d:
        keeps = []
    elif name in _SAVES_RESULT:
        keeps = [node]
    elif kinds.kind_of(node) == "leaf":
        keeps = kinds.tensor_inputs(node) if memory_of_leaf(node).keeps_input else []
    elif kinds.kind_of(node) in _SAVES_INPUT or name in _SAVES_BOTH:
        keeps = kinds.tensor_inputs(node)
    found = dict.fromkeys(storage(item) for item in keeps if name not in _SAVES_MASK)
    return tuple(item for item in found if item.op != "get_attr")


def put_saved(graph: fx.Graph) -> None:
    """Count anew what is saved, after a rewrite that changed what operations read or how large it is."""
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        cost, value = facts.get(node, Cost), first_value(node)
        if cost is not None and value is not None and cost.launch_us and not isinstance(node.target, Loop):
            saved = _saved(node, value, kept) if _gradients(node, value) else 0.0
            facts.put(node, replace(cost, saved=saved))


def storage(node: fx.Node) -> fx.Node:
    """The node whose memory this value is: views keep their source alive."""
    while name_of(node) in _ALIASES and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
