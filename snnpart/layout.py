"""Layouts: where batch and time lie in an input, as the user says it.

A layout is a string with one letter a dim, `"NCHW"`, `"TNCHW"`, `"NTCHW"`: N is the batch, T the time steps, the other
letters are for the reader. It is never guessed from the number of dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart.errors import ConfigError

BATCH, TIME = "N", "T"
Layouts = str | Sequence[str]
Dims = int | None | Sequence[int | None]


@dataclass(frozen=True, slots=True)
class InputDims:
    """Per tensor input, in the order of the flattened example inputs: batch dim and time dim (None: absent)."""

    batch: tuple[int | None, ...]
    time: tuple[int | None, ...]


def tensor_leaves(inputs: Any) -> list[Tensor]:
    """The tensors among the (nested) inputs, in order."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def input_dims(
    inputs: Any, *, layout: Layouts | None = None, in_dims: Dims | Any = None, time_dims: Dims | Any = None
) -> InputDims:
    """Where batch and time lie in every tensor of `inputs`.

    Args:
        inputs: example inputs (a tensor, or nested tuples, lists and dicts of them).
        layout: one layout string for all tensors, or one for each.
        in_dims: batch dim, for all tensors or one each, when no layout is given. Default 0, as in torch's DataParallel.
        time_dims: time dim likewise. Default: none.

    Raises:
        ConfigError: layout and in_dims together, a layout that does not fit its tensor, a wrong number of entries.
    """
    tensors = tensor_leaves(inputs)
    if layout is not None:
        if in_dims is not None or time_dims is not None:
            raise ConfigError("input_layout and in_dims say the same thing twice", fix="give one of them")
        layouts = _one_each(layout, len(tensors), "input_layout")
        return InputDims(*zip(*(_parse(text, x) for text, x in zip(layouts, tensors, strict=True)), strict=True))  # type: ignore[arg-type]
    batch = _one_each(0 if in_dims is None else in_dims, len(tensors), "in_dims")
    time = _one_each(time_dims, len(tensors), "time_dims")
    return InputDims(
        tuple(_checked(dim, x, "in_dims") for dim, x in zip(batch, tensors, strict=True)),
        tuple(_checked(dim, x, "time_dims") for dim, x in zip(time, tensors, strict=True)),
    )


def _one_each(given: Any, count: int, name: str) -> tuple[Any, ...]:
    if given is None or isinstance(given, (str, int)):
        return (given,) * count
    entries = tuple(given)
    if len(entries) != count:
        raise ConfigError(
            f"{name} has {len(entries)} entries for {count} input tensors", fix=f"give {count}, or one for all"
        )
    return entries


def check_layout(layout: str) -> None:
    """ConfigError unless the text holds the batch once and time at most once."""
    if layout.count(BATCH) != 1 or layout.count(TIME) > 1:
        raise ConfigError(
            f"input_layout={layout!r} must hold N (batch) once and T (time) at most once",
            choices=("NCHW", "TNCHW", "NTCHW", "NF", "TNF"),
        )


def _parse(layout: str, x: Tensor) -> tuple[int | None, int | None]:
    check_layout(layout)
    if len(layout) != x.dim():
        raise ConfigError(
            f"input_layout={layout!r} names {len(layout)} dims, the input has {x.dim()}: shape {tuple(x.shape)}",
            fix="give one letter for every dim",
        )
    return layout.index(BATCH), layout.index(TIME) if TIME in layout else None


def _checked(dim: int | None, x: Tensor, name: str) -> int | None:
    if dim is None or x.dim() == 0:
        return None
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{name}={dim} is outside the {x.dim()} dims of an input of shape {tuple(x.shape)}")
    return dim % x.dim()
