"""Batches into microbatches and back.

A batch of N samples is cut into parts whose sizes differ by one at most, along the batch dim of every input; the
outputs are put together along theirs. Losses are means over samples, so a part of n samples weighs n / N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart.errors import ConfigError
from snnpart.graph import InputInfo, SpikeGraph


def tensors_of(inputs: Any, expected: Sequence[InputInfo]) -> list[Tensor]:
    """The tensors among the nested inputs, in order; ConfigError when their number or dims are not the program's."""
    found = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if len(found) != len(expected):
        raise ConfigError(
            f"{len(found)} input tensors were given, the program takes {len(expected)}",
            fix="pass " + ", ".join(f"{info.name} {list(info.shape)}" for info in expected),
        )
    for info, x in zip(expected, found, strict=True):
        if x.dim() != len(info.shape):
            raise ConfigError(
                f"input '{info.name}' has shape {tuple(x.shape)}, {x.dim()} dims instead of {len(info.shape)}",
                fix=f"give it as {list(info.shape)}, batch at dim {info.batch_dim}",
            )
    return found


def batch_size(tensors: Sequence[Tensor], infos: Sequence[InputInfo]) -> int:
    """The number of samples; ConfigError when the inputs do not agree on it. 1 when no input has a batch."""
    sizes = {i.name: x.shape[i.batch_dim] for i, x in zip(infos, tensors, strict=True) if i.batch_dim is not None}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"the inputs have different batch sizes: {sizes}", fix="give every input the same batch")
    return next(iter(sizes.values()), 1)


def part_sizes(batch: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of the batch, larger ones first; ConfigError when there are fewer samples than parts."""
    if batch < parts:
        raise ConfigError(
            f"a batch of {batch} samples cannot be cut into {parts} microbatches",
            fix=f"give each data-parallel rank at least {parts} samples, or compile with microbatches={max(batch, 1)}",
        )
    return [batch // parts + (i < batch % parts) for i in range(parts)]


def split(x: Tensor, dim: int | None, sizes: Sequence[int]) -> list[Tensor]:
    """x cut along its batch dim; a tensor without one is given whole to every part."""
    return [x] * len(sizes) if dim is None else list(x.split(list(sizes), dim))


def split_nested(data: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    """Nested targets cut along `dim` of every tensor in them; whatever is not a tensor goes to every part.

    Raises:
        ConfigError: a tensor's size there is not the batch size.
    """
    leaves, spec = pytree.tree_flatten(data)
    batch = sum(sizes)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() <= dim or leaf.shape[dim] != batch):
            raise ConfigError(
                f"a target of shape {tuple(leaf.shape)} does not have the batch of {batch} samples at dim {dim}",
                fix="launch with target_dim= the batch dim of the targets",
            )
    parts = [split(leaf, dim, sizes) if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves]
    return [pytree.tree_unflatten([part[i] for part in parts], spec) for i in range(len(sizes))]


def replace_tensors(inputs: Any, tensors: Sequence[Tensor]) -> Any:
    """The nested inputs with other tensors in the places of theirs."""
    leaves, spec = pytree.tree_flatten(inputs)
    new = iter(tensors)
    return pytree.tree_unflatten([next(new) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def merge(parts: Sequence[Sequence[Tensor]], source: SpikeGraph, sizes: Sequence[int]) -> list[Tensor]:
    """The flat outputs of all microbatches as those of one batch.

    Outputs with a batch dim are put together along it. One without (a regulariser, a rate) is the mean over samples
    where it is a floating-point number, else the first microbatch's.
    """
    if len(parts) == 1:
        return list(parts[0])
    merged = []
    for info, values in zip(source.outputs, zip(*parts, strict=True), strict=True):
        if info.batch_dim is not None:
            merged.append(torch.cat(list(values), info.batch_dim))
        elif values[0].is_floating_point():
            merged.append(torch.stack([v * (n / sum(sizes)) for v, n in zip(values, sizes, strict=True)]).sum(0))
        else:
            merged.append(values[0])
    return merged


def structured(flat: Sequence[Any], source: SpikeGraph) -> Any:
    """The user's output structure from the flat outputs, constants at their places."""
    values = iter(flat)
    count = source.out_spec.num_leaves
    leaves = [source.out_constants[i] if i in source.out_constants else next(values) for i in range(count)]
    return pytree.tree_unflatten(leaves, source.out_spec)


def check_same_batch(sizes: Sequence[float], squares: Sequence[float], copies: int) -> None:
    """The ranks of one dp coordinate must be given one batch. From sums over them of its size and the size squared:
    all sizes are equal exactly when the square of the one is `copies` times the other."""
    odd = [dp for dp, (size, square) in enumerate(zip(sizes, squares, strict=True)) if size**2 != copies * square]
    if odd:
        raise ConfigError(
            f"the pp and tp ranks of dp {odd[0]} were given batches of different sizes",
            fix="give every rank with the same dp coordinate the same batch",
        )


def check_same_count(sizes: Sequence[float], microbatches: int) -> None:
    """Where parameters are gathered for each microbatch all dp ranks must have as many of them."""
    counts = [min(int(size), microbatches) for size in sizes]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the dp ranks have {counts} microbatches, and gather parameters together for each of them",
            fix=f"give every dp rank at least {microbatches} samples, leave the last batch out, or compile with "
            "fsdp_reshard=False",
        )


def check_finite(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """ConfigError when a tensor holds NaN or Inf."""
    for name, x in zip(names, tensors, strict=True):
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            bad = int((~torch.isfinite(x)).sum())
            raise ConfigError(
                f"{bad} of {x.numel()} numbers are NaN or Inf",
                where=f"input '{name}'",
                fix="look at the data, or launch with check_inputs=False",
            )
