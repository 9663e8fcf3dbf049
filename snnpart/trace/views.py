"""Views: how a value written through a view reaches the tensor it is a view of.

`scatter(base, view, target, args)` gives the operation that builds the new base from the old base and the new view, or
None when there is none that keeps values and gradients exact.

    index, select, narrow       base[index] = view
    unbind, split, chunk        the same for one of several results
    reshape and its kin         view.reshape(base.shape)
    permute and its kin         the inverse permutation
    detach, of a base without gradient    view
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from snnpart import ops

Scatter = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]

_RESHAPE_NAMES = """
    view reshape flatten unflatten unsqueeze unsqueeze_ squeeze squeeze_ view_as reshape_as contiguous ravel
"""
_RESHAPES = frozenset(_RESHAPE_NAMES.split())
_SWAPS = frozenset(["transpose", "transpose_", "swapaxes", "swapaxes_", "swapdims", "swapdims_"])
_WHOLE_SWAPS = frozenset(["t", "t_", "T", "mT"])


def scatter_for(name: str, base: Tensor, view: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scatter | None:
    """The way back for `view = name(base, *args, **kwargs)`; args and kwargs hold no nodes where they matter."""
    if base.dtype != view.dtype:
        return None
    if name in ("getitem", "__getitem__"):
        return lambda graph, old, new: graph.call_function(ops.index_assign, (old, args[0], new))
    if name == "select":
        dim, index = _named(args, kwargs, "dim", "index")
        return lambda graph, old, new: graph.call_function(torch.select_scatter, (old, new, dim, index))
    if name == "narrow":
        dim, start, length = _named(args, kwargs, "dim", "start", "length")
        return lambda graph, old, new: graph.call_function(torch.slice_scatter, (old, new, dim, start, start + length))
    if name in _RESHAPES and base.numel() == view.numel():
        shape = tuple(base.shape)
        return lambda graph, old, new: graph.call_function(torch.reshape, (new, shape))
    if name in ("detach", "data") and not base.requires_grad:
        return lambda graph, old, new: new
    order = _order(name, base, args, kwargs)
    if order is None:
        return None
    inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
    return lambda graph, old, new: graph.call_function(torch.permute, (new, inverse))


def piece_scatter(
    name: str, pieces: tuple[Tensor, ...], index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Scatter | None:
    """The way back for result number `index` of `unbind`, `split`, `chunk` and the like."""
    if name in ("unbind", "__iter__"):
        dim = kwargs.get("dim", args[0] if args else 0)
        return lambda graph, old, new: graph.call_function(torch.select_scatter, (old, new, dim, index))
    if name in ("split", "chunk", "tensor_split", "split_with_sizes"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        sizes = [piece.shape[dim] for piece in pieces]
        start, stop = sum(sizes[:index]), sum(sizes[: index + 1])
        return lambda graph, old, new: graph.call_function(torch.slice_scatter, (old, new, dim, start, stop))
    return None


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return tuple(given[name] for name in names)


def _order(name: str, base: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """The permutation of dims that made the view, or None for another kind of view."""
    count = base.dim()
    order = list(range(count))
    if name in _SWAPS:
        first, second = (int(dim) % count for dim in (args or tuple(kwargs.values()))[:2])
        order[first], order[second] = second, first
        return order
    if name in _WHOLE_SWAPS:
        if name == "mT":
            return [*order[:-2], count - 1, count - 2]
        return order[::-1]
    if name == "permute":
        given = kwargs.get("dims", args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args)
        return [int(dim) % count for dim in given]
    if name in ("movedim", "moveaxis"):
        moved = torch.movedim(torch.empty(*range(1, count + 1), device="meta"), *(args or tuple(kwargs.values())))
        return [size - 1 for size in moved.shape]
    return None
