"""In which form an operation takes all steps in one call.

    merged    [T*N, ...]: the operation as it is, on T times the samples. It must leave dim 0 alone.
    stacked   [T, N, ...]: for element-wise operations whose operands have no sample dim in front, or another one.

`form_of` decides from the node of one step and from which operands vary with the step. `Declined` says what is in the
way; such an operation runs step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from snnpart import facts, ops
from snnpart.facts import Value
from snnpart.passes.analyze import kinds
from snnpart.passes.analyze.kinds import argument

Form = Literal["merged", "stacked"]
Varies = Callable[[fx.Node], bool]

_NOT_STACKED = frozenset(["prelu", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"])
_DRAWS = frozenset({"rand_like", "randn_like", "bernoulli"})


@dataclass(frozen=True)
class Declined:
    """The operation does not take all steps in one call."""

    why: str


def form_of(node: fx.Node, varies: Varies) -> Form | Declined:
    """The form in which the operation takes all steps."""
    rule = _RULES.get(kinds.kind_of(node))
    name = kinds.name_of(node)
    if rule is None or name in _DRAWS:
        return Declined(f"{name or 'it'} is not known to treat samples apart")
    if kinds.first_value(node) is None or any(facts.get(n, Value) is None for n in _tensors(node, varies)):
        varying = [n for n in _tensors(node, varies) if facts.get(n, Value) is None]
        if kinds.first_value(node) is None or name != "getitem" or len(varying) != 1:
            return Declined("an operand is no tensor")
        return "merged"
    return rule(node, varies)


def _tensors(node: fx.Node, varies: Varies) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if varies(source)]


def _shape(node: Any) -> tuple[int, ...]:
    value = kinds.value_of(node)
    return value.shape if value is not None else ()


def keeps_samples(before: Value, after: Value) -> bool:
    """Whether dim 0 is the same in both: same size, same growth with the batch."""
    return bool(before.shape and after.shape) and (before.shape[0], before.slopes[0]) == (
        after.shape[0],
        after.slopes[0],
    )


def _elementwise(node: fx.Node, varies: Varies) -> Form | Declined:
    out = kinds.value_of(node)
    if out is None:
        return Declined("it has several results")
    for source in node.all_input_nodes:
        value = kinds.value_of(source)
        if value is None:
            continue
        full = len(value.shape) == len(out.shape)
        if varies(source):
            fits = full and keeps_samples(value, out)
        else:
            fits = not full or (value.shape[:1] == (1,) and value.slopes[:1] == (0,))
        if not fits or not out.shape:
            name = kinds.name_of(node)
            return Declined("its operands have other samples") if name in _NOT_STACKED else "stacked"
    return "merged"


def _only_first(node: fx.Node, varies: Varies) -> Declined | None:
    """All steps come by the first operand, which has samples in dim 0 as the result has."""
    x, out = node.args[0] if node.args else None, kinds.first_value(node)
    if not isinstance(x, fx.Node) or _tensors(node, varies) != [x]:
        return Declined("another operand than the first differs from step to step")
    value = kinds.value_of(x)
    if value is None or out is None or not keeps_samples(value, out):
        return Declined("its samples are not in dim 0")
    return None


def _sampled(dims: Callable[[fx.Node], int]) -> Callable[[fx.Node, Varies], Form | Declined]:
    """An operation on [N, ...] that needs at least `dims(node)` dims to take dim 0 as samples."""

    def rule(node: fx.Node, varies: Varies) -> Form | Declined:
        refused = _only_first(node, varies)
        if refused is None and len(_shape(node.args[0])) < dims(node):
            return Declined("it has no sample dim")
        return refused or "merged"

    return rule


def _space(node: fx.Node) -> int:
    """Dims of an input with samples and channels, by the digit in the operation's name."""
    digits = [int(c) for c in kinds.name_of(node) if c.isdigit()]
    return digits[-1] + 2 if digits else 3


def _pool(node: fx.Node, varies: Varies) -> Form | Declined:
    name = kinds.name_of(node)
    if name == "pad":
        sizes = argument(node, 1, "pad")
        if len(sizes) >= 2 * len(_shape(node.args[0])):
            return Declined("it pads dim 0")
        return _only_first(node, varies) or "merged"
    return _sampled(lambda n: 3 if name == "interpolate" else _space(n))(node, varies)


def _norm(node: fx.Node, varies: Varies) -> Form | Declined:
    name = kinds.name_of(node)
    if node.target is ops.batch_norm:
        return _sampled(lambda n: 2)(node, varies)
    if name in ("softmax", "log_softmax"):
        return _along(node, varies)
    if name == "layer_norm" or name == "rms_norm":
        normalized = argument(node, 1, "normalized_shape")
        if len(normalized) >= len(_shape(node.args[0])):
            return Declined("it normalises over dim 0")
        return _only_first(node, varies) or "merged"
    if name == "group_norm":
        return _sampled(lambda n: 2)(node, varies)
    return Declined(f"{name} is not known to treat samples apart")


def _along(node: fx.Node, varies: Varies) -> Form | Declined:
    """An operation along dims, none of which is dim 0."""
    refused = _only_first(node, varies)
    dims = argument(node, 1, "dim")
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    rank = len(_shape(node.args[0]))
    if refused or not all(isinstance(d, int) and not isinstance(d, bool) and d % rank for d in listed):
        return refused or Declined("it works along dim 0")
    return "merged"


def _view(node: fx.Node, varies: Varies) -> Form | Declined:
    refused = _only_first(node, varies)
    name, rank = kinds.name_of(node), len(_shape(node.args[0]))
    if refused:
        return refused
    if name == "reshape":
        out = kinds.value_of(node)
        assert out is not None
        return Declined("a size other than the first grows with the batch") if any(out.slopes[1:]) else "merged"
    if name == "flatten":
        return "merged" if argument(node, 1, "start_dim", 0) % rank else Declined("it flattens dim 0")
    dim = argument(node, 1, "dim")
    if not isinstance(dim, int) or dim % (rank + (name == "unsqueeze")) == 0:
        return Declined("it changes dim 0")
    return "merged"


def _permute(node: fx.Node, varies: Varies) -> Form | Declined:
    refused, rank = _only_first(node, varies), len(_shape(node.args[0]))
    if refused:
        return refused
    if kinds.name_of(node) == "permute":
        return "merged" if argument(node, 1, "dims")[0] % rank == 0 else Declined("it moves dim 0")
    given = [argument(node, 1, "dim0"), argument(node, 2, "dim1")]
    if kinds.name_of(node) == "movedim":
        given = [argument(node, 1, "source"), argument(node, 2, "destination")]
    flat = [d for g in given for d in (g if isinstance(g, (tuple, list)) else (g,))]
    return "merged" if all(isinstance(d, int) and d % rank for d in flat) else Declined("it moves dim 0")


def _index(node: fx.Node, varies: Varies) -> Form | Declined:
    name, rank = kinds.name_of(node), len(_shape(node.args[0]))
    refused = _only_first(node, varies)
    if refused:
        return refused
    if name in ("select", "narrow", "unbind", "split", "chunk"):
        position = 2 if name in ("split", "chunk") else 1
        dim = argument(node, position, "dim", 0)
        return "merged" if isinstance(dim, int) and dim % rank else Declined("it takes part of dim 0")
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    taken = sum(isinstance(item, (int, slice)) for item in index)
    whole = bool(index) and (index[0] == slice(None) or (index[0] is Ellipsis and taken < rank))
    if not whole or not all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in index):
        return Declined("it takes part of dim 0")
    return "merged"


def _join(node: fx.Node, varies: Varies) -> Form | Declined:
    items, out = node.args[0], kinds.value_of(node)
    dim = argument(node, 1, "dim", 0)
    if out is None or dim % len(out.shape) == 0:
        return Declined("it joins along dim 0")
    values = [kinds.value_of(item) for item in items]  # type: ignore[union-attr]
    if not all(value is not None and keeps_samples(value, out) for value in values):
        return Declined("the samples of an operand are not in dim 0")
    return "merged"


def _matmul(node: fx.Node, varies: Varies) -> Form | Declined:
    out = kinds.value_of(node)
    operands = [arg for arg in node.args if isinstance(arg, fx.Node) and kinds.value_of(arg) is not None]
    if out is None or len(operands) < 2 or len(out.shape) < 2:
        return Declined("an operand has no sample dim")
    varying = [item for item in operands if varies(item)]
    values = [kinds.value_of(item) for item in varying]
    same = all(v is not None and len(v.shape) == len(out.shape) and keeps_samples(v, out) for v in values)
    if len(varying) == len(operands) and same and len(out.shape) > 2:
        return "merged"
    if varying == [operands[0]] and same and len(_shape(operands[1])) <= 2:
        return "merged"
    return Declined("its operands have other samples")


def _resized(node: fx.Node, varies: Varies) -> Form | Declined:
    """expand, repeat, roll, flip and their like, where they leave dim 0 alone."""
    name, refused = kinds.name_of(node), _only_first(node, varies)
    rank = len(_shape(node.args[0]))
    if refused:
        return refused
    if name in ("cumsum", "index_select", "gather"):
        return _along(node, varies) if name == "cumsum" else Declined(f"{name} reads other elements of dim 0")
    if name == "flip":
        return "merged" if all(d % rank for d in argument(node, 1, "dims")) else Declined("it turns dim 0 around")
    if name == "expand" and len(_shape(node)) == rank and not any((kinds.value_of(node) or _NO).slopes[1:]):
        return "merged"
    return Declined(f"{name} is not known to leave dim 0 alone")


_NO = Value((), facts.torch.float32, ())

_RULES: dict[str, Callable[[fx.Node, Varies], Form | Declined]] = {
    "elementwise": _elementwise,
    "surrogate": _elementwise,
    "conv": _sampled(_space),
    "linear": _sampled(lambda node: 2),
    "pool": _pool,
    "norm": _norm,
    "view": _view,
    "permute": _permute,
    "index": _index,
    "join": _join,
    "reduction": _along,
    "matmul": _matmul,
    "same": _resized,
}
