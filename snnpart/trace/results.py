"""Results on fake tensors, kept by operation and metadata: a loop over time runs each operation once, not T times.

Running one operation on fake tensors goes through torch's dispatcher and costs some 0.2 ms; making a tensor that looks
like a known result costs a tenth of it. A result is kept only where its metadata follows from what the key holds:

    the function, which is torch's own (a user's function, or operation, may do anything)
    shape, strides, dtype, device and requires_grad of every tensor among the arguments
    every other argument with its type, down to the items of tuples, lists, dicts and slices
    whether autograd is on, and the default dtype

and only where it is new memory: views, results that are an argument, and what knows its own value (`torch.tensor(3)`)
are made anew each time, as are calls without a tensor, which depend on the default device. Writes in place do not come
here at all. Random operations do: nothing but the metadata of their result is kept.

A kept result that requires a gradient is a leaf of autograd, until `settle` makes it the result of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snnpart.compat import FakeTensor, FakeTensorMode, blank, dispatch_modes, knows_its_value, storage_key
from snnpart.trace.flags import TrainingFlag

_LITERALS = (int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)
_PLAIN = frozenset(_LITERALS)
_OF_TORCH = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_PYTHON = ("torch.functional", "torch.nn.functional", "torch._tensor")


class Blank(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Several(NamedTuple):
    """A result of several items: how they are put together, and what each looks like."""

    build: Callable[[list[Any]], Any]
    items: tuple[Any, ...]


class _NotKept(Exception):
    """The call, or its result, has something that a key or a template cannot hold."""


class Results:
    """The results of one recording."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        self._known: dict[Any, Any] = {}
        self._leaves: dict[int, Tensor] = {}

    def of(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> tuple[Any, bool]:
        """The result of a call on fakes, and whether it was known; `run` computes it where it is not.

        Args:
            what: what is called; the same arguments give the same metadata each time.
        """
        if torch.is_inference_mode_enabled() or any(mode is not self._fakes for mode in dispatch_modes()):
            return run(), False
        try:
            key = what, torch.is_grad_enabled(), torch.get_default_dtype(), _key(args), _key(kwargs)
            known = self._known.get(key)
            if known is not None:
                return self._make(known), True
        except _NotKept:
            return run(), False
        inputs = list(_tensors((args, kwargs)))
        out = run()
        if inputs:
            self._keep(key, out, inputs)
        return out, False

    def settle(self, tensor: Tensor) -> None:
        """Let autograd see a kept result as the result of an operation, before it is written or asked for its graph."""
        if self._leaves.pop(id(tensor), None) is None:
            return
        source = blank(self._fakes, (), (), tensor.dtype, tensor.device).requires_grad_()
        with torch.enable_grad():
            tensor.requires_grad_(False).add_(source)

    def _keep(self, key: Any, out: Any, inputs: list[Tensor]) -> None:
        taken = {storage_key(tensor) for tensor in inputs}
        try:
            template = _template(out, taken)
        except _NotKept:
            return
        if isinstance(template, (Blank, Several)):
            self._known[key] = template

    def _make(self, known: Any) -> Any:
        if isinstance(known, Blank):
            made = blank(self._fakes, known.shape, known.stride, known.dtype, known.device)
            if known.requires_grad:
                self._leaves[id(made)] = made.requires_grad_()
            return made
        if isinstance(known, Several):
            return known.build([self._make(item) for item in known.items])
        return known


def may_be_known(function: Any) -> bool:
    """Whether a function is one of torch's, whose result looks the same whenever its arguments do, and may be new."""
    kind = type(function)
    ours = kind in _OF_TORCH or (kind is FunctionType and function.__module__ in _PYTHON)
    return ours and function is not torch.Tensor.__getitem__


def _key(value: Any) -> Any:
    """The value as something hashable that tells apart what gives results of other metadata."""
    kind = type(value)
    if kind is FakeTensor:
        if value.layout is not torch.strided or value.is_complex() or value.is_inference() or knows_its_value(value):
            raise _NotKept
        return FakeTensor, value.shape, value.stride(), value.dtype, value.fake_device, value.requires_grad
    if kind in _PLAIN:
        return kind, value
    if kind is tuple or kind is list or kind is torch.Size or hasattr(kind, "_fields"):
        return kind, *[_key(item) for item in value]
    if kind is dict:
        return dict, *[(name, _key(item)) for name, item in value.items()]
    if kind is slice:
        return slice, _key(value.start), _key(value.stop), _key(value.step)
    if kind is TrainingFlag:
        return TrainingFlag
    raise _NotKept


def _template(out: Any, taken: set[int]) -> Any:
    """What a result looks like; its tensors may share no memory with those in `taken`, nor with each other."""
    kind = type(out)
    if kind is FakeTensor:
        memory = storage_key(out)
        odd = out.layout is not torch.strided or out.is_complex() or out.storage_offset() or knows_its_value(out)
        if odd or memory in taken or out.is_inference():
            raise _NotKept
        taken.add(memory)
        return Blank(tuple(out.shape), out.stride(), out.dtype, out.fake_device, out.requires_grad)
    if kind in (tuple, list) or kind.__module__ == "torch.return_types":
        return Several(kind, tuple(_template(item, taken) for item in out))
    if hasattr(kind, "_fields"):
        return Several(lambda items: kind(*items), tuple(_template(item, taken) for item in out))
    if kind in _PLAIN and out is not None:
        return out
    raise _NotKept


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
