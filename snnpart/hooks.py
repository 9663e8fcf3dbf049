"""Gradient hooks of the user's parameters (`register_hook`), on copies and on the slices of tp ranks.

A hook is made for the whole gradient of its parameter. On a rank that has a part of it (a slice, or a summand) it would
compute something else, so such a parameter stays whole; but for hooks that an adapter knows to treat every element by
itself, such as one that keeps a diagonal at zero. These run on a slice as well: it is put into its place among zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snnpart import compat, ops
from snnpart.facts import Pieces
from snnpart.frameworks import hook_by_element

Hook = Callable[[Tensor], Tensor | None]


def needs_whole(tensor: Tensor) -> bool:
    """Whether the tensor has a hook that must see its whole gradient."""
    return not all(map(hook_by_element, compat.gradient_hooks(tensor)))


def carry(old: Tensor, new: Tensor, dim: int | None = None, pieces: Pieces = ()) -> None:
    """Have the gradient of a copy go through the hooks of the original, once; with `dim` it is a copy of these
    `pieces`."""
    there = compat.gradient_hooks(new)
    for hook in compat.gradient_hooks(old) if new.requires_grad else ():
        if hook not in there:
            new.register_hook(hook if dim is None else _on_slice(hook, tuple(old.shape), dim, pieces))


def _on_slice(hook: Hook, shape: tuple[int, ...], dim: int, pieces: Pieces) -> Hook:
    def on_slice(gradient: Tensor) -> Tensor | None:
        whole = hook(_placed(gradient, shape, dim, pieces))
        return None if whole is None else ops.select_pieces(whole, dim, pieces).contiguous()

    return on_slice


def _placed(part: Tensor, shape: tuple[int, ...], dim: int, pieces: Pieces) -> Tensor:
    """Zeros of this shape, with the part where its pieces are."""
    whole: Any = part.new_zeros(shape)
    sizes = [stop - start for start, stop in pieces]
    for (start, stop), own in zip(pieces, part.split(sizes, dim) if pieces else (), strict=True):
        whole.narrow(dim, start, stop - start).copy_(own)
    return torch.Tensor.detach(whole)
