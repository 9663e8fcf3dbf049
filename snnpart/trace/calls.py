"""Example inputs as a call of the module: which argument each tensor is, and where its batch and time lie.

A tensor is the only argument; a tuple holds positional arguments, a dict keyword arguments; anything else is one
argument. Tensors may lie nested inside. Leaves that are no tensors stay as they are in every call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart.errors import ConfigError
from snnpart.graph import BATCH_SIZE, TRAINING, InputInfo
from snnpart.layout import input_dims


@dataclass(frozen=True)
class ExampleCall:
    """Flat leaves of the example inputs with their structure; `infos` describes the tensors among them, in order."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    infos: tuple[InputInfo, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def constants(self) -> list[Any]:
        return [leaf for leaf in self.leaves if not isinstance(leaf, Tensor)]

    @property
    def batch(self) -> int | None:
        """The example batch size; None when no input has a batch dim."""
        sizes = {info.name: info.shape[info.batch_dim] for info in self.infos if info.batch_dim is not None}
        if len(set(sizes.values())) > 1:
            raise ConfigError(
                f"the inputs have different batch sizes: {', '.join(f'{name} {size}' for name, size in sizes.items())}",
                fix="say with in_dims= which dim of each input is the batch (None: an input without batch)",
            )
        return next(iter(sizes.values()), None)

    def sizes(self) -> set[int]:
        """Every size of every dim of the inputs."""
        return {size for info in self.infos for size in info.shape}

    def blank(self, batch: int | None) -> list[Tensor]:
        """New tensors like the example's, with another batch size."""
        made = []
        for info, like in zip(self.infos, self.tensors, strict=True):
            shape = list(info.shape)
            if info.batch_dim is not None and batch is not None:
                shape[info.batch_dim] = batch
            device = "cpu" if like.is_meta else like.device
            made.append(torch.empty(shape, dtype=like.dtype, device=device, requires_grad=like.requires_grad))
        return made

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's args and kwargs with these tensors in place of the example's."""
        rest = iter(tensors)
        inputs = pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in self.leaves], self.spec)
        return _as_arguments(inputs)


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs in the user's form as args and kwargs."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs, {}) if type(inputs) is tuple else ((inputs,), {})


def example_call(model: nn.Module, inputs: Any, in_dims: Any, time_dims: Any) -> ExampleCall:
    """Read the example inputs.

    Raises:
        ConfigError: there is no tensor among them, they do not fit forward's signature, or dims do not fit.
    """
    keyed, spec = pytree.tree_flatten_with_path(inputs)
    leaves = tuple(leaf for _, leaf in keyed)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ConfigError("the example inputs hold no tensor", fix="give the tensors that forward takes")
    dims = input_dims(inputs, in_dims=in_dims, time_dims=time_dims)
    names = _names(model, inputs, [path for path, _ in keyed])
    found = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    infos = tuple(
        InputInfo(name, tuple(x.shape), x.dtype, batch, time)
        for (name, x), batch, time in zip(found, dims.batch, dims.time, strict=True)
    )
    return ExampleCall(spec, leaves, infos)


def _names(model: nn.Module, inputs: Any, paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """A name for every leaf: the argument's, with the path inside it."""
    arguments = _argument_names(model, inputs)
    taken = {TRAINING, BATCH_SIZE, "self"}
    names = []
    for path in paths:
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        first = arguments.get(keys[0], keys[0]) if keys and arguments else next(iter(arguments.values()), "x")
        if type(inputs) is tuple or isinstance(inputs, Mapping):
            keys = keys[1:]
        names.append(_unique(re.sub(r"\W", "_", "_".join((first, *keys))), taken))
    return names


def _argument_names(model: nn.Module, inputs: Any) -> dict[str, str]:
    """Key of the first level -> name of forward's parameter."""
    args, kwargs = _as_arguments(inputs)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"forward of {type(model).__name__} does not take the example inputs: {error}",
            fix="give a tensor, a tuple of positional arguments, or a dict of keyword arguments",
        ) from error
    if kwargs:
        return {str(key): str(key) for key in kwargs}
    names: list[str] = []
    for name, value in bound.arguments.items():
        variadic = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names.extend(f"{name}_{i}" for i in range(len(value))) if variadic else names.append(name)
    return {str(i): name for i, name in enumerate(names)}


def _unique(name: str, taken: set[str]) -> str:
    made, count = name if name and not name[0].isdigit() else f"x{name}", 1
    while made in taken:
        made, count = f"{name}_{count}", count + 1
    taken.add(made)
    return made
