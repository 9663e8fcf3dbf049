"""Rows of operations that work on each channel by itself: element-wise, norms, neurons, surrogates, pooling."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import facts, ops
from snnpart.facts import Sharded, Spread, Value
from snnpart.frameworks import adapter_for
from snnpart.passes.decide.rules import Ask, Declined, Row, argument, first_lane, is_tensor, results, row, shape

ELEMENTWISE = [
    "abs",
    "absolute",
    "acos",
    "add",
    "addcdiv",
    "addcmul",
    "asin",
    "atan",
    "atan2",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clone",
    "copysign",
    "cos",
    "cosh",
    "deg2rad",
    "detach",
    "div",
    "elu",
    "empty_like",
    "eq",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "float_power",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "full_like",
    "ge",
    "gelu",
    "gt",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "heaviside",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "lerp",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsigmoid",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mish",
    "mul",
    "nan_to_num",
    "ne",
    "neg",
    "ones_like",
    "positive",
    "pow",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "softshrink",
    "softsign",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "tanhshrink",
    "threshold",
    "trunc",
    "where",
    "xlogy",
    "zeros_like",
]
ELEMENTWISE_METHODS = frozenset({"to", "type_as", "contiguous", "masked_fill"})
POOLS = {
    name: space
    for space in (1, 2, 3)
    for name in (
        f"max_pool{space}d",
        f"avg_pool{space}d",
        f"adaptive_avg_pool{space}d",
        f"adaptive_max_pool{space}d",
        f"max_pool{space}d_with_indices",
        f"adaptive_max_pool{space}d_with_indices",
        f"lp_pool{space}d",
    )
}


def functions(names: Iterable[str]) -> set[Any]:
    """The functions of these names in torch and torch.nn.functional."""
    return {getattr(where, name) for name in names for where in (torch, F) if hasattr(where, name)}


def elementwise(node: fx.Node, ask: Ask) -> Row:
    """Operands with the full size lie on the lane, those that are broadcast over it are whole on every rank."""
    out = next(results(node)).shape
    source = first_lane(node, ask)
    lane = ask.need(source)
    dim = lane.dim + len(out) - len(shape(source))
    if shape(source)[lane.dim] != out[dim]:
        raise Declined("the sharded dim is broadcast")
    needs: dict[fx.Node, Spread] = {}
    for operand in filter(is_tensor, node.all_input_nodes):
        own = dim - (len(out) - len(shape(operand)))
        if own >= 0 and shape(operand)[own] == out[dim]:
            needs[operand] = Sharded(own, lane.pieces)
    return row(node, Sharded(dim, lane.pieces), needs)


def batch_norm(node: fx.Node, ask: Ask) -> Row:
    """Statistics are per channel; running averages, scale and shift are cut with the channels."""
    lane = ask.need(node.args[0])
    if lane.dim != 1:
        raise Declined("its channels are in dim 1, but its input is sharded in another")
    needs: dict[fx.Node, Spread] = {node.args[0]: lane}  # type: ignore[dict-item]
    needs.update({n: Sharded(0, lane.pieces) for n in node.args[1:5] if isinstance(n, fx.Node)})
    return row(node, lane, needs)


def leaf(node: fx.Node, ask: Ask) -> Row:
    """A neuron layer whose channels do not mix. State that is not there yet (an empty or scalar tensor) stays whole."""
    module = ask.graph.leaves[str(node.target)].module
    adapter = adapter_for(module)
    source = first_lane(node, ask)
    lane = ask.need(source)
    size = len(shape(source))
    own = adapter.channel_tensors(module)
    if own is None:
        raise Declined(f"{type(module).__name__} mixes channels, or is not known to keep them apart")
    channels = adapter.channel_dim(module, size)
    free = adapter.is_elementwise(module) and not own and lane.dim != adapter.time_dim(module)
    if lane.dim != channels and not free:
        raise Declined(
            f"{type(module).__name__} has its channels in dim {channels}, its input is sharded in dim {lane.dim}"
        )
    full = shape(source)[lane.dim]
    parts = () if is_tensor(node) else tuple(user for user in node.users if user.target is operator.getitem)
    taken = [result for user in parts for result in results(user)]
    if any(len(result.shape) <= lane.dim or result.shape[lane.dim] != full for result in taken):
        raise Declined("its state, which the network uses, has its channels in another dim than its output")
    needs: dict[fx.Node, Spread] = {}
    for operand in node.all_input_nodes:
        if not is_tensor(operand):
            if ask.lane(operand) != lane:
                raise Declined("its state is a tuple that does not lie with its input")
            needs[operand] = lane
        elif len(shape(operand)) == size and shape(operand)[lane.dim] == full:
            needs[operand] = lane
    return row(node, lane, needs)


def surrogate(node: fx.Node, ask: Ask) -> Row:
    """A function with its own backward, where a trial shows that it treats every element by itself."""
    found = elementwise(node, ask)
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if any(
        isinstance(spread, Sharded) and shape(n) != next(results(node)).shape
        for n, spread in zip(node.all_input_nodes, found.inputs)
    ):
        raise Declined("its result has another shape than its input")
    target = node.target
    assert isinstance(target, ops.Surrogate)  # the table asks for no other
    sizes = tuple(len(shape(n)) for n in tensors)
    types = tuple(facts.need(n, Value).dtype for n in tensors)
    positions = tuple(tensors.index(a) if isinstance(a, fx.Node) and a in tensors else None for a in node.args)
    literals = tuple(a for a, position in zip(node.args, positions) if position is None)
    try:
        separable = _is_elementwise(target, positions, literals, sizes, types)
    except TypeError:
        raise Declined("its arguments cannot be tried out") from None
    if not separable:
        raise Declined(f"{target.function.__name__} is not seen to treat every element by itself")
    return found


@cache
def _is_elementwise(
    function: ops.Surrogate,
    positions: tuple[int | None, ...],
    literals: tuple[Any, ...],
    sizes: tuple[int, ...],
    types: tuple[torch.dtype, ...],
) -> bool:
    """Whether forward and backward on random numbers are bit-equal to those on each element alone.

    A proof by trial: a function that couples elements only on rare inputs would pass, which the gate then meets.
    """
    random = torch.Generator().manual_seed(0)
    whole = [_sample(size, kind, random) for size, kind in zip(sizes, types)]
    count = max((t.numel() for t in whole), default=0)
    cotangent = torch.randn(count, generator=random, dtype=torch.float64)
    try:
        reference = _run(function, positions, literals, whole, cotangent)
        pieces = [
            _run(function, positions, literals, [_element(t, i) for t in whole], cotangent[i : i + 1])
            for i in range(count)
        ]
    except Exception:
        return False
    return all(torch.equal(value, torch.cat([piece[i] for piece in pieces])) for i, value in enumerate(reference))


def _sample(size: int, kind: torch.dtype, random: torch.Generator) -> torch.Tensor:
    extents = (3, *(2,) * (size - 1)) if size else ()
    return (2 * torch.randn(extents, generator=random, dtype=torch.float64)).to(kind)


def _element(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor.reshape(-1)[index].reshape((1,) * tensor.dim()) if tensor.dim() else tensor


def _run(
    function: ops.Surrogate,
    positions: tuple[int | None, ...],
    literals: tuple[Any, ...],
    tensors: list[torch.Tensor],
    cotangent: torch.Tensor,
) -> list[torch.Tensor]:
    """The result and the gradients of the operands with the full size, each flat."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    rest = iter(literals)
    out = function(*(next(rest) if position is None else inputs[position] for position in positions))
    full = [t for t in inputs if t.requires_grad and t.dim()]
    weights = cotangent.to(out.dtype).reshape(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), full, allow_unused=True) if out.requires_grad else ()
    return [out.detach().reshape(-1), *(grad.reshape(-1) for grad in grads if grad is not None)]


def drawn(node: fx.Node, ask: Ask) -> Row:
    """Dropout and numbers drawn for every element: each rank draws them whole and keeps its own."""
    lane = ask.need(node.args[0])
    if argument(node, 3, "inplace") or any(isinstance(a, fx.Node) and is_tensor(a) for a in node.args[1:]):
        raise Declined("it is drawn in place, or with a tensor of probabilities")
    return row(node, lane, {node.args[0]: lane})  # type: ignore[dict-item]


def pool(node: fx.Node, ask: Ask, space: int) -> Row:
    """Pooling over the last `space` dims."""
    x = argument(node, 0, "input")
    lane = ask.need(x)
    if lane.dim >= len(shape(x)) - space:
        raise Declined("it pools over the sharded dim")
    return row(node, lane, {x: lane})


def unpool(node: fx.Node, ask: Ask, space: int) -> Row:
    """Pooling undone: values and the places they came from lie alike."""
    found = pool(node, ask, space)
    places = argument(node, 1, "indices")
    return row(node, found.output, dict.fromkeys((argument(node, 0, "input"), places), found.output))


def resize(node: fx.Node, ask: Ask) -> Row:
    """Interpolation of the dims after batch and channel."""
    x = argument(node, 0, "input")
    lane = ask.need(x)
    if lane.dim > 1:
        raise Declined("it resizes the sharded dim")
    return row(node, lane, {x: lane})


def pad(node: fx.Node, ask: Ask) -> Row:
    """Padding of the last dims."""
    x, sizes = argument(node, 0, "input"), argument(node, 1, "pad")
    lane = ask.need(x)
    padded = len(sizes) // 2
    if lane.dim >= len(shape(x)) - padded and any(sizes[2 * (len(shape(x)) - 1 - lane.dim) :][:2]):
        raise Declined("it pads the sharded dim")
    return row(node, lane, {x: lane})
