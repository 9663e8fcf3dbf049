"""What the recorder remembers of a tensor, and of a call that was run on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from snnpart.facts import Value, Values
from snnpart.trace.roots import Root


@dataclass(slots=True, eq=False)
class Memory:
    """Memory shared by some tensors: how often it was written, and how many tensors are not views of another."""

    writes: int = 0
    bases: int = 0


class Called(NamedTuple):
    """A call as the mode sees it; `inputs` are the (fake) tensors among its arguments."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]


class How(NamedTuple):
    """A call: the function's name, and what it was called with."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True, eq=False)
class Cell:
    """One tensor, the node that holds its value, and, for a view, what it is a view of and how it was made.

    `makers` are the nodes that led from `base_node` to the view; `how` is the function's name with the arguments after
    the first; `piece` tells which of several results it is; `seen` is the number of writes that `node` includes.
    """

    tensor: Tensor
    node: fx.Node
    memory: Memory
    root: Root | None = None
    base: Cell | None = None
    base_node: fx.Node | None = None
    makers: tuple[fx.Node, ...] = ()
    how: How = How("", (), {})
    piece: tuple[int, tuple[Tensor, ...]] | None = None
    seen: int = 0
    from_function: tuple[Tensor, ...] = ()


class Call(NamedTuple):
    """A call that was run on fake tensors: how, the tensors among its arguments, and its result.

    `detached`: it ran outside autograd on tensors that carry a gradient.
    """

    how: How
    inputs: list[Tensor]
    out: Any
    detached: bool


def items_of(out: Any) -> tuple[Any, ...]:
    """The items of a tuple, list or dict result."""
    return tuple(out.values()) if isinstance(out, dict) else tuple(out)


def value_of(item: Any) -> Any:
    """The facts of a result: `Value` of a tensor, `Values` of several, anything else as it is."""
    if isinstance(item, Tensor):
        shape = tuple(item.shape)
        return Value(shape, item.dtype, (0,) * len(shape), tuple(item.stride()), item.requires_grad)
    if isinstance(item, (tuple, list, dict)):
        return Values(tuple(value_of(one) for one in items_of(item)))
    return item
