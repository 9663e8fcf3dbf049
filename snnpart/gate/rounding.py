"""Launched programs are compared in whole float32. With TensorFloat-32, torch's default for convolutions on GPUs, a
product keeps ten bits: two right programs that choose other algorithms then differ by more than a comparison allows.

torch has two interfaces for it: `allow_tf32`, and `fp32_precision`, where what is set for one operation goes before
what is set for all. Reading the first raises where the second says something else; so the first is used where it can
be read. The user's own module is not run inside, whose code may read either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import backends

_cudnn: Any = backends.cudnn  # a module that makes its attributes itself
_OF_ALL: tuple[Any, ...] = (backends, _cudnn)
_OPERATIONS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (_cudnn, (_cudnn.conv, _cudnn.rnn)),
    (backends.cuda.matmul, (backends.cuda.matmul,)),
)
"""What has `allow_tf32`, and the operations that it stands for."""


@contextmanager
def whole_float32() -> Iterator[None]:
    """Products of float32 numbers in float32; afterwards every switch reads as before.

    What torch has by itself is then set: a later choice for all operations does not reach it any more.
    """
    with ExitStack() as stack:
        for general in _OF_ALL:  # first: what is set for all shows through where nothing else is
            _set(stack, general, "fp32_precision", "tf32", "ieee")
        for owner, operations in _OPERATIONS:
            if _readable(owner):
                _set(stack, owner, "allow_tf32", True, False)
            for operation in operations:
                _set(stack, operation, "fp32_precision", "tf32", "ieee")
        yield


def _readable(owner: Any) -> bool:
    try:
        return isinstance(owner.allow_tf32, bool)
    except RuntimeError:
        return False


def _set(stack: ExitStack, owner: Any, name: str, old: object, new: object) -> None:
    """The new value where the old one is, until the stack is left."""
    if getattr(owner, name) == old:
        setattr(owner, name, new)
        stack.callback(setattr, owner, name, old)
