"""Types in the text form: `float32[8+2n, 3, 32, 32] stride (3072, 1, 96, 3) grad`, and nested tuples of them.

`8+2n` is a dim of 8 at the example batch which grows by 2 with each further sample. The stride is written when it is
not the contiguous one (`stride ?`: unknown), `grad` when the value requires grad.
"""

from __future__ import annotations

from typing import Any

import torch

from snnpart.facts import Value, Values
from snnpart.text import literals
from snnpart.text.lexer import Line
from snnpart.text.literals import Reader


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def write_value(value: Value) -> str:
    """The type of one tensor."""
    dims = ", ".join(_write_dim(size, slope) for size, slope in zip(value.shape, value.slopes, strict=True))
    text = f"{str(value.dtype).removeprefix('torch.')}[{dims}]"
    if not value.stride and value.shape:
        text += " stride ?"
    elif value.stride != contiguous(value.shape):
        text += f" stride {literals.write(value.stride)}"
    return text + (" grad" if value.requires_grad else "")


def _write_dim(size: int, slope: int) -> str:
    if slope == 0:
        return str(size)
    return f"{size}{'+' if slope > 0 else '-'}{abs(slope) if abs(slope) != 1 else ''}n"


def write_values(items: tuple[Any, ...]) -> str:
    """The types of several results; a result that is itself several reads back as `Values`."""
    inner = [_write_item(item) for item in items]
    return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"


def _write_item(item: Any) -> str:
    if isinstance(item, Value):
        return write_value(item)
    if isinstance(item, Values):
        return write_values(item.items)
    return write_values(item) if isinstance(item, tuple) else literals.write(item)


def read_type(line: Line, reader: Reader) -> Any:
    """A Value, a tuple of types, or a constant."""
    if line.take("("):
        items = []
        while not line.take(")"):
            item = read_type(line, reader)
            items.append(Values(item) if isinstance(item, tuple) else item)
            if not line.take(","):
                line.expect(")")
                break
        return tuple(items)
    is_dtype = isinstance(getattr(torch, line.peek.text, None), torch.dtype) if line.peek.kind == "name" else False
    return read_value(line, reader) if is_dtype else reader.read(line)


def read_value(line: Line, reader: Reader) -> Value:
    """The type of one tensor."""
    token = line.need("name", "a dtype")
    dtype = getattr(torch, token.text, None)
    if not isinstance(dtype, torch.dtype):
        raise line.error(f"'{token.text}' is no dtype", token.column)
    line.expect("[")
    shape, slopes = _read_dims(line)
    stride = contiguous(shape)
    if line.take("stride"):
        stride = () if line.take("?") else tuple(reader.read(line))
    return Value(shape, dtype, slopes, stride, line.take("grad"))


def _read_dims(line: Line) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, slopes = [], []
    while not line.take("]"):
        shape.append(read_int(line))
        growth = line.next().text[:-1] if line.peek.kind == "growth" else "0"
        slopes.append(int(growth + "1" if growth in "+-" else growth))
        if not line.take(","):
            line.expect("]")
            break
    return tuple(shape), tuple(slopes)


def read_int(line: Line) -> int:
    """The whole number at the cursor."""
    token = line.need("number", "a whole number")
    if not token.text.lstrip("-").isdigit():
        raise line.error(f"{token.text} is no whole number", token.column)
    return int(token.text)
