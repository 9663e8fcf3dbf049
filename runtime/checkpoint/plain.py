"""Small state (schedulers, positions, generators) as JSON, without pickle: what JSON lacks is tagged.

Dicts whose keys are no texts, tuples, tensors and bytes come back as they were; anything else is refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import CheckpointError

_PAIRS, _TUPLE, _TENSOR, _BYTES = "__pairs__", "__tuple__", "__tensor__", "__bytes__"


def encode(value: Any, where: str = "extra") -> Any:
    """The value as JSON can hold it; CheckpointError names what it cannot."""
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Tensor):
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), value.flatten().tolist()]}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold",
        fix="use numbers, text, lists, dicts and tensors",
    )


def _mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("__") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {_PAIRS: [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]}


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _PAIRS in value:
        return {decode(key): decode(item) for key, item in value[_PAIRS]}
    if _TUPLE in value:
        return tuple(decode(item) for item in value[_TUPLE])
    if _TENSOR in value:
        dtype, shape, numbers = value[_TENSOR]
        return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    return {key: decode(item) for key, item in value.items()}
