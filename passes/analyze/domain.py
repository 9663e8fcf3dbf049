"""analyze-domain: which numbers a value can hold, by interval arithmetic from the inputs on.

A value is known by (low, high, whole): an interval and whether only whole numbers occur. Neurons give the domain that
their adapter states, an `autograd.Function` what follows from the operations of its forward (`surrogates`). Nothing is
claimed that is not certain: where the bound of a sum depends on the batch, it is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from snnpart import facts
from snnpart.facts import Domain, Value
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph, output_node
from snnpart.ops import Surrogate
from snnpart.ops_time import Loop
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import argument, first_value, name_of
from snnpart.passes.analyze.surrogates import surrogate_bounds

INF = math.inf


@dataclass(frozen=True, slots=True)
class Range:
    """All numbers of [low, high], or (`whole`) only the whole ones."""

    low: float = -INF
    high: float = INF
    whole: bool = False

    def domain(self) -> Domain:
        if not self.whole:
            return Domain("real", self.low, self.high)
        if self.low >= 0 and self.high <= 1:
            return Domain("spike", self.low, self.high)
        kind: Literal["ternary", "integer"] = "ternary" if self.low >= -1 and self.high <= 1 else "integer"
        return Domain(kind, self.low, self.high)


ANY, BIT = Range(), Range(0, 1, True)


@dataclass(frozen=True)
class AnalyzeDomain:
    """Writes `Domain` on every node that makes a tensor."""

    name: ClassVar[str] = "analyze-domain"
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = (Domain,)
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        ranges: dict[fx.Node, Range] = {}
        for node in graph.graph.nodes:
            value = first_value(node)
            if value is None or node.op == "output":
                continue
            ranges[node] = _of_dtype(_range(node, graph, ranges), value.dtype)
            facts.put(node, ranges[node].domain())


def _of_dtype(found: Range, dtype: torch.dtype) -> Range:
    """What the dtype alone says."""
    if dtype == torch.bool:
        return Range(max(found.low, 0), min(found.high, 1), True)
    if dtype == torch.uint8:
        return Range(max(found.low, 0), min(found.high, 255), True)
    return found if dtype.is_floating_point or dtype.is_complex else Range(found.low, found.high, True)


def _range(node: fx.Node, graph: SpikeGraph, ranges: dict[fx.Node, Range]) -> Range:
    if node.op == "call_module":
        module = graph.leaves[str(node.target)].module
        known = adapter_for(module).output_domain(module)
        return Range(known.low, known.high, known.kind != "real")
    if node.op not in ("call_function", "call_method"):
        return ANY
    if isinstance(node.target, Surrogate):
        return Range(*surrogate_bounds(node))
    if isinstance(node.target, Loop):
        return _hull(*_loop(node, graph, ranges))
    if name_of(node) == "getitem" and isinstance(node.args[0], fx.Node) and isinstance(node.args[0].target, Loop):
        return _loop(node.args[0], graph, ranges)[node.args[1]]  # type: ignore[index]
    rule = _RULES.get(name_of(node))
    operands = [_operand(arg, ranges) for arg in node.args]
    return ANY if rule is None or not operands else rule(node, operands)


def _loop(node: fx.Node, graph: SpikeGraph, ranges: dict[fx.Node, Range]) -> list[Range]:
    """The ranges of a loop's results, whatever it carries from step to step."""
    assert isinstance(node.target, Loop)
    given = [ranges.get(item, ANY) for part in node.args[:2] for item in part]  # type: ignore[union-attr, arg-type]
    found = [_inside(inner, given, graph) for inner in node.target.graphs]
    carried = len(node.args[2])  # type: ignore[arg-type]
    return [_hull(*results) for results in list(zip(*found, strict=True))[carried:]]


def _inside(inner: fx.Graph, given: list[Range], graph: SpikeGraph) -> list[Range]:
    """The ranges of what one step returns."""
    ranges: dict[fx.Node, Range] = {}
    waiting = iter(given)
    for node in inner.nodes:
        value = first_value(node)
        if node.op == "placeholder":
            ranges[node] = next(waiting, ANY)
        elif node.op != "output":
            found = _range(node, graph, ranges)
            ranges[node] = found if value is None else _of_dtype(found, value.dtype)
    return [ranges[node] for node in output_node(inner).args[0]]  # type: ignore[union-attr, index]


def _operand(arg: Any, ranges: dict[fx.Node, Range]) -> Range:
    """The range of an argument: a node, a number, or the hull of a list of them."""
    if isinstance(arg, fx.Node):
        return ranges.get(arg, ANY)
    if isinstance(arg, (bool, int, float)):
        return Range(float(arg), float(arg), float(arg).is_integer())
    if isinstance(arg, (tuple, list)) and arg:
        return _hull(*(_operand(item, ranges) for item in arg))
    return ANY


def _hull(*ranges: Range) -> Range:
    return Range(min(r.low for r in ranges), max(r.high for r in ranges), all(r.whole for r in ranges))


def _first(node: fx.Node, given: list[Range]) -> Range:
    return given[0]


def _item(node: fx.Node, given: list[Range]) -> Range:
    """One of several results: of a neuron layer only the first is spikes, the pieces of a split are all alike."""
    source = node.args[0]
    several = isinstance(source, fx.Node) and kinds.value_of(source) is None
    if several and name_of(source) not in ("chunk", "split", "unbind") and node.args[1] != 0:  # type: ignore[arg-type]
        return ANY
    return given[0]


def _bit(node: fx.Node, given: list[Range]) -> Range:
    return BIT


def _add(node: fx.Node, given: list[Range]) -> Range:
    a, b = given[0], given[1]
    return ANY if node.kwargs else Range(a.low + b.low, a.high + b.high, a.whole and b.whole)


def _sub(node: fx.Node, given: list[Range]) -> Range:
    a, b = given[0], given[1]
    return ANY if node.kwargs else Range(a.low - b.high, a.high - b.low, a.whole and b.whole)


def _rsub(node: fx.Node, given: list[Range]) -> Range:
    return _sub(node, [given[1], given[0], *given[2:]])


def _product(a: Range, b: Range, times: float = 1) -> Range:
    if not all(map(math.isfinite, (a.low, a.high, b.low, b.high))):
        return Range(0 if min(a.low, b.low) >= 0 else -INF, INF, a.whole and b.whole)
    ends = [x * y * times for x in (a.low, a.high) for y in (b.low, b.high)]
    return Range(min(ends), max(ends), a.whole and b.whole)


def _mul(node: fx.Node, given: list[Range]) -> Range:
    return _product(given[0], given[1])


def _div(node: fx.Node, given: list[Range]) -> Range:
    a, b = given[0], given[1]
    if node.kwargs or b.low != b.high or b.low == 0:
        return ANY
    ends = (a.low / b.low, a.high / b.low)
    return Range(min(ends), max(ends), a.whole and abs(b.low) == 1)


def _matmul(node: fx.Node, given: list[Range]) -> Range:
    """A sum of products over the contracted dim."""
    left = kinds.value_of(node.args[0])
    if left is None or left.slopes[-1]:
        return ANY
    return _product(given[0], given[1], left.shape[-1])


def _neg(node: fx.Node, given: list[Range]) -> Range:
    return Range(-given[0].high, -given[0].low, given[0].whole)


def _abs(node: fx.Node, given: list[Range]) -> Range:
    a = given[0]
    return Range(max(0.0, a.low, -a.high), max(abs(a.low), abs(a.high)), a.whole)


def _square(node: fx.Node, given: list[Range]) -> Range:
    a = _abs(node, given)
    return Range(a.low**2, a.high**2, a.whole)


def _relu(node: fx.Node, given: list[Range]) -> Range:
    return Range(max(given[0].low, 0), max(given[0].high, 0), given[0].whole)


def _clamp(node: fx.Node, given: list[Range]) -> Range:
    bounds = (argument(node, 1, "min"), argument(node, 2, "max"))
    if any(isinstance(bound, fx.Node) for bound in bounds):
        return ANY
    low, high = (-INF if bounds[0] is None else bounds[0]), (INF if bounds[1] is None else bounds[1])
    whole = given[0].whole and all(bound is None or float(bound).is_integer() for bound in bounds)
    return Range(min(max(given[0].low, low), high), max(min(given[0].high, high), low), whole)


def _extreme(pick: Callable[..., float]) -> Callable[[fx.Node, list[Range]], Range]:
    def rule(node: fx.Node, given: list[Range]) -> Range:
        if len(given) < 2 or not isinstance(node.args[1], (fx.Node, float)):
            return given[0]
        a, b = given[0], given[1]
        return Range(pick(a.low, b.low), pick(a.high, b.high), a.whole and b.whole)

    return rule


def _rounded(node: fx.Node, given: list[Range]) -> Range:
    a = given[0]
    if not (math.isfinite(a.low) and math.isfinite(a.high)):
        return Range(a.low, a.high, True)
    return Range(math.floor(a.low), math.ceil(a.high), True)


def _within(low: float, high: float, whole: bool = False) -> Callable[[fx.Node, list[Range]], Range]:
    return lambda node, given: Range(low, high, whole)


def _where(node: fx.Node, given: list[Range]) -> Range:
    return _hull(given[1], given[2]) if len(given) > 2 else ANY


def _index_assign(node: fx.Node, given: list[Range]) -> Range:
    return _hull(given[0], given[2])


def _masked_fill(node: fx.Node, given: list[Range]) -> Range:
    return _hull(given[0], given[2]) if len(given) > 2 else ANY


def _sum(node: fx.Node, given: list[Range]) -> Range:
    """As many terms as elements are summed; unknown when the batch is among them."""
    before, after = kinds.value_of(node.args[0]), first_value(node)
    if before is None or after is None or after.numel == 0 or sum(before.slopes) != sum(after.slopes):
        return Range(0 if given[0].low >= 0 else -INF, INF, given[0].whole)
    count = before.numel / after.numel
    return Range(_times(given[0].low, count), _times(given[0].high, count), given[0].whole)


def _times(bound: float, count: float) -> float:
    return bound * count if bound else 0.0


def _mean(node: fx.Node, given: list[Range]) -> Range:
    return Range(given[0].low, given[0].high)


def _average(node: fx.Node, given: list[Range]) -> Range:
    """A mean in which the padding's zeros take part."""
    return Range(min(given[0].low, 0), max(given[0].high, 0))


def _pad(node: fx.Node, given: list[Range]) -> Range:
    mode, value = argument(node, 2, "mode", "constant"), argument(node, 3, "value")
    return given[0] if mode != "constant" else _hull(given[0], _operand(value or 0, {}))


def _dropout(node: fx.Node, given: list[Range]) -> Range:
    return given[0] if argument(node, 1, "p") == 0 or argument(node, 2, "train") is False else ANY


def _interpolate(node: fx.Node, given: list[Range]) -> Range:
    return given[0] if argument(node, 3, "mode", "nearest").startswith("nearest") else ANY


def _full(node: fx.Node, given: list[Range]) -> Range:
    return given[1] if len(given) > 1 else ANY


_SAME = (
    "reshape view flatten unflatten squeeze unsqueeze permute transpose movedim t select narrow chunk split unbind "
    "expand repeat roll flip cat stack detach clone to type_as contiguous positive gather index_select max_pool1d "
    "max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin all_gather shard"
)
_BITS = (
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite bernoulli one_hot any all"
)
Rule = Callable[[fx.Node, list[Range]], Range]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME.split(), _first), **dict.fromkeys(_BITS.split(), _bit),
    "getitem": _item, "add": _add, "sub": _sub, "rsub": _rsub, "mul": _mul, "div": _div, "matmul": _matmul,
    "bmm": _matmul, "mm": _matmul, "neg": _neg, "abs": _abs, "square": _square, "relu": _relu, "clamp": _clamp,
    "maximum": _extreme(max), "minimum": _extreme(min), "max": _extreme(max), "min": _extreme(min), "floor": _rounded,
    "ceil": _rounded, "round": _rounded, "sign": _within(-1, 1, True), "sigmoid": _within(0, 1), "tanh": _within(-1, 1),
    "softmax": _within(0, 1), "exp": _within(0, INF), "where": _where, "index_assign": _index_assign,
    "masked_fill": _masked_fill, "sum": _sum, "mean": _mean, "avg_pool1d": _average, "avg_pool2d": _average,
    "avg_pool3d": _average, "adaptive_avg_pool1d": _mean, "adaptive_avg_pool2d": _mean, "adaptive_avg_pool3d": _mean,
    "pad": _pad, "dropout": _dropout, "interpolate": _interpolate, "zeros": _within(0, 0, True),
    "zeros_like": _within(0, 0, True), "new_zeros": _within(0, 0, True), "ones": _within(1, 1, True),
    "ones_like": _within(1, 1, True), "new_ones": _within(1, 1, True), "full": _full, "full_like": _full,
    "rand": _within(0, 1), "rand_like": _within(0, 1),
}  # fmt: skip
