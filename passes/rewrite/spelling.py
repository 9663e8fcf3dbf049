"""The one spelling of each operation, as tables.

The form that canonicalize leaves behind:

- an operation that `torch` has a function for is that function, whichever way the user wrote it: `x + y`, `x.add(y)`
  and `torch.add(x, y)` are `torch.add`; `x.view(2, 3)` and `x.reshape(2, 3)` are `torch.reshape(x, (2, 3))`.
- an operation that only `torch.nn.functional` has is that one (`F.linear`, `F.adaptive_avg_pool2d`, `F.interpolate`).
- indexing is `operator.getitem`, with slices in the place of dots. A cast is the method `to`; `expand`, `repeat`,
  `contiguous`, `type_as` and the other methods without a function stay methods.
- for the operations of `SIGNATURES` the arguments are positional, in the order given there, with defaults filled in,
  sizes and dims as tuples, and dims counted from the front.

Arithmetic with a number on the left keeps what Python computes: `1 - x` is `torch.rsub(x, 1)`, `1 / x` is
`torch.mul(torch.reciprocal(x), 1)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

SYNONYMS: Mapping[str, str] = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "absolute": "abs", "negative": "neg",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "concat": "cat",
    "concatenate": "cat", "clip": "clamp",
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__rsub__": "rsub", "__mul__": "mul", "__rmul__": "mul",
    "__truediv__": "div", "__div__": "div", "__floordiv__": "floor_divide", "__mod__": "remainder", "__pow__": "pow",
    "__matmul__": "matmul", "__neg__": "neg", "__pos__": "positive", "__abs__": "abs", "__invert__": "bitwise_not",
    "__and__": "bitwise_and", "__rand__": "bitwise_and", "__or__": "bitwise_or", "__ror__": "bitwise_or",
    "__xor__": "bitwise_xor", "__rxor__": "bitwise_xor", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le",
    "__gt__": "gt", "__ge__": "ge",
}  # fmt: skip
"""Other names of a torch function, among them the methods behind Python's operators."""

OPERATORS: Mapping[Function, str] = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div", operator.pow: "pow",
    operator.floordiv: "floor_divide", operator.mod: "remainder", operator.matmul: "matmul", operator.neg: "neg",
    operator.pos: "positive", operator.abs: "abs", operator.invert: "bitwise_not", operator.and_: "bitwise_and",
    operator.or_: "bitwise_or", operator.xor: "bitwise_xor", operator.eq: "eq", operator.ne: "ne", operator.lt: "lt",
    operator.le: "le", operator.gt: "gt", operator.ge: "ge",
}  # fmt: skip

MIRRORED: Mapping[str, str] = {
    "add": "add", "mul": "mul", "sub": "rsub", "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or",
    "bitwise_xor": "bitwise_xor", "eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le",
}  # fmt: skip
"""The function that gives `op(number, x)` as `mirrored(x, number)`."""

CASTS: Mapping[str, torch.dtype] = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "bool": torch.bool, "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8,
    "byte": torch.uint8,
}  # fmt: skip

KEPT_METHODS = frozenset(
    {"contiguous", "to", "type_as", "expand", "repeat", "new_zeros", "new_ones", "new_full", "new_empty"}
)
"""Methods that stay methods although a torch function of this name may exist (with other arguments)."""

VARIADIC = frozenset({"reshape", "view", "permute", "expand", "repeat", "flip", "tile"})
"""Methods that take their sizes or dims one by one as well as in a tuple."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Positional arguments of an operation: names and defaults, which of them are dims, which are spatial tuples.

    `dims` names arguments that count dims of the first argument (`new_dim`: of the result, which has one more).
    `spatial` names arguments that become a tuple with one entry for each of the `space` spatial dims.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    dims: tuple[str, ...] = ()
    new_dim: bool = False
    spatial: tuple[str, ...] = ()
    space: int = 0


REQUIRED = object()


def _signature(
    text: str, *, dims: str = "", new_dim: bool = False, spatial: str = "", space: int = 0, **defaults: Any
) -> Signature:
    return Signature(tuple(text.split()), defaults, tuple(dims.split()), new_dim, tuple(spatial.split()), space)


def _convolution(space: int) -> Signature:
    return _signature(
        "input weight bias stride padding dilation groups", bias=None, stride=1, padding=0, dilation=1, groups=1,
        spatial="stride padding dilation", space=space,
    )  # fmt: skip


def _transposed(space: int) -> Signature:
    return _signature(
        "input weight bias stride padding output_padding groups dilation", bias=None, stride=1, padding=0,
        output_padding=0, groups=1, dilation=1, spatial="stride padding output_padding dilation", space=space,
    )  # fmt: skip


def _max_pool(space: int) -> Signature:
    return _signature(
        "input kernel_size stride padding dilation ceil_mode", stride=None, padding=0, dilation=1, ceil_mode=False,
        spatial="kernel_size stride padding dilation", space=space,
    )  # fmt: skip


def _avg_pool(space: int) -> Signature:
    return _signature(
        "input kernel_size stride padding ceil_mode count_include_pad", stride=None, padding=0, ceil_mode=False,
        count_include_pad=True, spatial="kernel_size stride padding", space=space,
    )  # fmt: skip


_BINARY = (
    "add sub rsub mul div floor_divide remainder maximum minimum matmul bmm mm eq ne lt le gt ge logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
)
_UNARY = (
    "relu sigmoid tanh neg abs exp log sqrt rsqrt reciprocal square sin cos sign floor ceil round detach clone "
    "logical_not bitwise_not positive"
)
_REDUCTION = _signature("input dim keepdim", dims="dim", dim=None, keepdim=False)

SIGNATURES: dict[Function, Signature] = {
    torch.conv1d: _convolution(1), torch.conv2d: _convolution(2), torch.conv3d: _convolution(3),
    torch.conv_transpose1d: _transposed(1), torch.conv_transpose2d: _transposed(2),
    torch.conv_transpose3d: _transposed(3),
    F.linear: _signature("input weight bias", bias=None),
    torch.max_pool1d: _max_pool(1), torch.max_pool2d: _max_pool(2), torch.max_pool3d: _max_pool(3),
    torch.avg_pool1d: _avg_pool(1), F.avg_pool2d: _avg_pool(2), F.avg_pool3d: _avg_pool(3),
    torch.adaptive_avg_pool1d: _signature("input output_size"), F.adaptive_avg_pool2d: _signature("input output_size"),
    F.adaptive_avg_pool3d: _signature("input output_size"),
    torch.dropout: _signature("input p train", p=0.5, train=True),
    torch.layer_norm: _signature("input normalized_shape weight bias eps", weight=None, bias=None, eps=1e-5),
    torch.group_norm: _signature("input num_groups weight bias eps", weight=None, bias=None, eps=1e-5),
    torch.reshape: _signature("input shape"),
    torch.flatten: _signature("input start_dim end_dim", start_dim=0, end_dim=-1, dims="start_dim end_dim"),
    torch.unflatten: _signature("input dim sizes", dims="dim"),
    torch.permute: _signature("input dims", dims="dims"),
    torch.transpose: _signature("input dim0 dim1", dims="dim0 dim1"),
    torch.movedim: _signature("input source destination", dims="source destination"),
    torch.squeeze: _signature("input dim", dim=None, dims="dim"),
    torch.unsqueeze: _signature("input dim", dims="dim", new_dim=True),
    torch.select: _signature("input dim index", dims="dim"),
    torch.narrow: _signature("input dim start length", dims="dim"),
    torch.chunk: _signature("input chunks dim", dim=0, dims="dim"),
    torch.split: _signature("tensor split_size_or_sections dim", dim=0, dims="dim"),
    torch.unbind: _signature("input dim", dim=0, dims="dim"),
    torch.cat: _signature("tensors dim", dim=0, dims="dim"),
    torch.stack: _signature("tensors dim", dim=0, dims="dim", new_dim=True),
    torch.softmax: _signature("input dim", dims="dim"), torch.log_softmax: _signature("input dim", dims="dim"),
    torch.sum: _REDUCTION, torch.mean: _REDUCTION, torch.amax: _REDUCTION, torch.amin: _REDUCTION,
    torch.clamp: _signature("input min max", min=None, max=None),
    torch.where: _signature("condition input other"),
    **{getattr(torch, name): _signature("input other") for name in _BINARY.split()},
    **{getattr(torch, name): _signature("input") for name in _UNARY.split()},
}  # fmt: skip

KEYWORDS_TO_DROP: Mapping[str, tuple[Any, ...]] = {
    "inplace": (False,), "return_indices": (False,), "_stacklevel": (3, 5), "dtype": (None,), "alpha": (1,),
    "out": (None,),    "rounding_mode": (None,), "memory_format": (None, torch.preserve_format), "antialias": (False,),
}  # fmt: skip
"""Keyword arguments that say nothing when they have one of these values."""

FUNCTIONAL: Mapping[Function, Function] = {
    F.relu: torch.relu, F.sigmoid: torch.sigmoid, F.tanh: torch.tanh, F.softmax: torch.softmax,
    F.log_softmax: torch.log_softmax, F.max_pool1d: torch.max_pool1d, F.max_pool2d: torch.max_pool2d,
    F.max_pool3d: torch.max_pool3d, F.layer_norm: torch.layer_norm, F.group_norm: torch.group_norm,
    F.dropout: torch.dropout,
}  # fmt: skip
"""Functions of torch.nn.functional that torch has too, with the same leading arguments."""

RENAMED: Mapping[Function, Mapping[str, str]] = {torch.dropout: {"training": "train"}}
"""Keyword names that differ between the two."""
