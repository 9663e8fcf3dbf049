"""canonicalize: one spelling per operation, identities and dead code gone. Bit-exact.

Three steps, each linear in the graph:

1. respell: every node takes the target and the argument form of `spelling`. One node stays one node, except `1 / x`.
2. forward identities: a reshape, cast, contiguous or clone that gives the value back as it was gives way to its input.
   A clone of something that a buffer write could change later, and a clone that is then written in place, stay.
3. sweep: nodes without users and without effect go, from the end to the front. A dropout whose value nobody uses
   stays: it draws from the generator, and the draws after it would change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from snnpart import effects, facts, ops
from snnpart.facts import Value
from snnpart.graph import BATCH_SIZE, SpikeGraph
from snnpart.passes.rewrite import spelling
from snnpart.passes.rewrite.spelling import Function, Signature


@dataclass(frozen=True)
class Canonicalize:
    """The pass."""

    name: ClassVar[str] = "canonicalize"
    reads: ClassVar[tuple[type, ...]] = (Value,)
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "exact"

    def run(self, graph: SpikeGraph) -> None:
        for node in list(graph.graph.nodes):
            respell(node)
        for node in list(graph.graph.nodes):
            if is_identity(node):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        sweep(graph.graph)


def sweep(graph: fx.Graph) -> None:
    """Erase every node that has neither users nor an effect, and a `batch_size` that no size needs."""
    for node in reversed(list(graph.nodes)):
        unused_size = node.op == "placeholder" and node.target == BATCH_SIZE
        if not node.users and (unused_size or not effects.has_effect(node)):
            graph.erase_node(node)


def respell(node: fx.Node) -> None:
    """Give the node the spelling of its operation (in place; the value is the same)."""
    if node.op == "call_function" and _is_method(node.target):
        node.op, node.target = "call_method", node.target.__name__  # type: ignore[union-attr]
    if node.op == "call_method":
        _respell_method(node)
    elif node.op == "call_function":
        _respell_function(node)
    if node.target in (operator.getitem, ops.index_assign):
        _respell_index(node)
    if node.op == "call_function" and node.target in spelling.SIGNATURES:
        _respell_arguments(node, spelling.SIGNATURES[node.target])


def _is_method(target: Any) -> bool:
    """True for `torch.Tensor.relu` called as a function."""
    owner, _, name = getattr(target, "__qualname__", "").rpartition(".")
    return owner in ("Tensor", "TensorBase") and hasattr(torch.Tensor, name)


def _respell_method(node: fx.Node) -> None:
    name = str(node.target)
    if effects.is_in_place(node):
        return
    if name in spelling.VARIADIC:
        node.args = _gather_sizes(node.args)
    if name in spelling.CASTS:
        node.target, node.args, node.kwargs = "to", (node.args[0], spelling.CASTS[name]), {}
    elif name == "view" and not (len(node.args) > 1 and isinstance(node.args[1], torch.dtype)):
        _become(node, torch.reshape, node.args)
    elif name == "__getitem__":
        _become(node, operator.getitem, node.args)
    elif name in ("__rdiv__", "__rtruediv__"):
        _divide_number(node, node.args[1], node.args[0])
    elif name == "__rpow__":
        _become(node, torch.pow, (node.args[1], node.args[0]))
    elif name not in spelling.KEPT_METHODS:
        function = getattr(torch, spelling.SYNONYMS.get(name, name), None)
        if function is not None:
            _become(node, function, node.args)


def _gather_sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`(x, 2, 3)` and `(x, [2, 3])` as `(x, (2, 3))`."""
    first = args[1] if len(args) == 2 else args[1:]
    if isinstance(first, (tuple, list)):
        return (args[0], tuple(first))
    return (args[0], (first,)) if isinstance(first, (int, fx.Node)) else args


def _respell_function(node: fx.Node) -> None:
    target: Any = node.target
    if target in spelling.OPERATORS and _on_tensors(node):
        _respell_operator(node, spelling.OPERATORS[target])
    elif target in spelling.FUNCTIONAL:
        _become(node, spelling.FUNCTIONAL[target], node.args)
    else:
        name = spelling.SYNONYMS.get(getattr(target, "__name__", ""), "")
        if name and getattr(torch, target.__name__, None) is target:
            _become(node, getattr(torch, name), node.args)


def _on_tensors(node: fx.Node) -> bool:
    return any(isinstance(arg, fx.Node) and facts.get(arg, Value) is not None for arg in node.args)


def _respell_operator(node: fx.Node, name: str) -> None:
    if len(node.args) == 1 or isinstance(node.args[0], fx.Node):
        _become(node, getattr(torch, name), node.args)
    elif name == "div":
        _divide_number(node, node.args[0], node.args[1])
    elif name in spelling.MIRRORED:
        _become(node, getattr(torch, spelling.MIRRORED[name]), (node.args[1], node.args[0]))
    elif name == "pow":
        _become(node, torch.pow, node.args)


def _divide_number(node: fx.Node, number: Any, x: Any) -> None:
    """`number / x` as Python computes it: the reciprocal, then the product."""
    with node.graph.inserting_before(node):
        inverse = node.graph.call_function(torch.reciprocal, (x,))
    facts.put(inverse, *facts.every(node).values())
    _become(node, torch.mul, (inverse, number))


def _respell_index(node: fx.Node) -> None:
    """`x[:, t, ...]`, read or assigned to, with a slice for each dim that the dots stand for, so that every number has
    its dim's place."""
    source, index, *given = node.args
    value = facts.get(source, Value) if isinstance(source, fx.Node) else None
    if value is None or not isinstance(index, tuple) or not any(item is Ellipsis for item in index):
        return
    plain = [item for item in index if isinstance(item, (int, slice)) and not isinstance(item, bool)]
    if len(plain) + sum(item is None for item in index) + 1 == len(index):
        at = next(i for i, item in enumerate(index) if item is Ellipsis)
        rest = (slice(None),) * (len(value.shape) - len(plain))
        node.args = (source, (*index[:at], *rest, *index[at + 1 :]), *given)


def _become(node: fx.Node, function: Function, args: tuple[Any, ...]) -> None:
    node.op, node.target, node.args = "call_function", function, args


def _respell_arguments(node: fx.Node, signature: Signature) -> None:
    """All arguments of the signature by position, what is left of the keywords without those that say nothing."""
    bound = _bind(node, signature)
    if bound is None:
        return
    given, rest = bound
    rank = _rank(given[signature.names[0]])
    for name in signature.dims:
        if rank is not None:
            given[name] = _from_front(given[name], rank + signature.new_dim)
    for name in signature.spatial:
        given[name] = _spread(given[name], signature.space)
    if "kernel_size" in given and "stride" in given and not given["stride"]:
        given["stride"] = given["kernel_size"]
    args = tuple(given[name] for name in signature.names)
    node.args = args[:-1] if node.target is torch.squeeze and args[-1] is None else args
    node.kwargs = rest


def _bind(node: fx.Node, signature: Signature) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Arguments by name and the keywords outside the signature; None when the call has another form."""
    renamed = spelling.RENAMED.get(node.target, {})  # type: ignore[arg-type]
    rest = {renamed.get(name, name): value for name, value in node.kwargs.items() if not _says_nothing(name, value)}
    positional = node.args[: len(signature.names)]
    if any(extra is not False for extra in node.args[len(signature.names) :]):
        return None
    given = {**signature.defaults, **dict(zip(signature.names, positional, strict=False))}
    given |= {name: rest.pop(name) for name in signature.names if name in rest}
    return (given, rest) if all(name in given for name in signature.names) else None


def _says_nothing(name: str, value: Any) -> bool:
    return any(value is idle or value == idle for idle in spelling.KEYWORDS_TO_DROP.get(name, ()))


def _rank(first: Any) -> int | None:
    """Number of dims of the first argument, or of its first element."""
    if isinstance(first, (tuple, list)):
        first = first[0] if first else None
    value = facts.get(first, Value) if isinstance(first, fx.Node) else None
    return None if value is None else len(value.shape)


def _from_front(dim: Any, rank: int) -> Any:
    if isinstance(dim, (tuple, list)):
        return tuple(_from_front(one, rank) for one in dim)
    return dim + rank if isinstance(dim, int) and dim < 0 else dim


def _spread(size: Any, space: int) -> Any:
    if isinstance(size, int):
        return (size,) * space
    if isinstance(size, (tuple, list)):
        return tuple(size) * space if len(size) == 1 else tuple(size)
    return size


def is_identity(node: fx.Node) -> bool:
    """True when the node's value is its first argument's, bit for bit and with the same layout."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = facts.get(node.args[0], Value), facts.get(node, Value)
    if before is None or after is None or before.shape != after.shape or before.slopes != after.slopes:
        return False
    if node.target == "to":
        return len(node.args) == 2 and node.args[1] is before.dtype and not node.kwargs
    if node.target == "contiguous":
        return not node.kwargs and len(node.args) == 1 and before.stride == after.stride != ()
    if node.target is torch.clone:
        return _is_removable_clone(node)
    return node.target in (torch.reshape, torch.positive) and before.stride == after.stride


def _is_removable_clone(node: fx.Node) -> bool:
    """A clone matters where its source may be written later: a tensor of the network, an input, an in-place write."""
    source = node.args[0]
    while isinstance(source, fx.Node) and source.op in ("call_function", "call_method") and source.args:
        if source.target not in _VIEWS:
            return not node.kwargs and not any(effects.is_in_place(u) or u.op == "output" for u in node.users)
        source = source.args[0]
    return False


_VIEWS = frozenset(
    {torch.reshape, torch.flatten, torch.unflatten, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze,
     torch.select, torch.narrow, torch.detach, torch.movedim, operator.getitem, "expand", "contiguous", "to"}
)  # fmt: skip
