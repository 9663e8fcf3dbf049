"""Sizes of tensors while tracing: integers that write down what the code asks about them.

`if x.shape[0] > 1:` is decided at the batch size being traced. Two runs at two batch sizes may agree on it where a
third would not, so every size is a `Size`: an int that keeps, through + - * / // and %, the expression it came from,
and writes each comparison into the run's `Comparisons`. Where the value is a float it is a `Ratio`, likewise.
`guards` fits the sizes in two runs' comparisons to lines in the batch size N and keeps those that depend on it.

Python turns the answer of `len(x)` into an int of its own, so `len` is replaced while a forward runs. What leaves these
numbers is plain and is not followed: `int(n / 2)`, `round`, `math.sqrt(n)`, a power, a bit operation, and an operation
of a float with a size on its right (`0.5 * n`), which Python gives to the float.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from snnpart.graph import BatchGuard
from snnpart.trace import places
from snnpart.trace.patches import patched

Tree = Any
"""A number, `("size", value)`, or `(operator, Tree, Tree)`."""

_MOST = 32
"""Operations in one expression; a longer one is no longer followed."""


class Comparisons:
    """What one run of forward asked, in order: place, expression and answer. Nothing is added once it is closed."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[Tree, bool]]] = defaultdict(list)
        self.open = True

    def add(self, tree: Tree, holds: bool) -> None:
        if not self.open:
            return
        frame = places.users_frame()
        place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.found[place].append((tree, holds))


class Size(int):
    """A size, or what became of one."""

    tree: Tree
    asked: Comparisons

    @classmethod
    def of(cls, value: int, asked: Comparisons, tree: Tree = None) -> Size:
        made = cls(value)
        made.tree, made.asked = ("size", value) if tree is None else tree, asked
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        holds = int.__bool__(self)
        self.asked.add(("!=", self.tree, 0), holds)
        return holds


class Ratio(float):
    """A float that became of a size."""

    tree: Tree
    asked: Comparisons

    @classmethod
    def of(cls, value: float, asked: Comparisons, tree: Tree) -> Ratio:
        made = cls(value)
        made.tree, made.asked = tree, asked
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        holds = float.__bool__(self)
        self.asked.add(("!=", self.tree, 0), holds)
        return holds


Followed = Size | Ratio


def _comparison(symbol: str) -> Callable[[Any, Any], Any]:
    function = _COMPARE[symbol]

    def compare(self: Followed, other: Any) -> Any:
        if not isinstance(other, int) and not (isinstance(other, float) and math.isfinite(other)):
            return NotImplemented
        holds = function(plain(self), plain(other))
        self.asked.add((symbol, self.tree, _tree(other)), holds)
        return holds

    return compare


def _arithmetic(symbol: str, swapped: bool) -> Callable[[Any, Any], Any]:
    function = _COMPUTE[symbol]

    def compute(self: Followed, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        value = function(plain(other), plain(self)) if swapped else function(plain(self), plain(other))
        left, right = (_tree(other), self.tree) if swapped else (self.tree, _tree(other))
        tree = (symbol, left, right)
        if _length(tree) > _MOST or not math.isfinite(value):
            return value
        return Size.of(value, self.asked, tree) if type(value) is int else Ratio.of(value, self.asked, tree)

    return compute


_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_COMPUTE = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
}  # fmt: skip
for _kind in (Size, Ratio):
    for _name, _symbol in zip(("lt", "le", "gt", "ge", "eq", "ne"), _COMPARE, strict=True):
        setattr(_kind, f"__{_name}__", _comparison(_symbol))
    for _name, _symbol in zip(("add", "sub", "mul", "truediv", "floordiv", "mod"), _COMPUTE, strict=True):
        setattr(_kind, f"__{_name}__", _arithmetic(_symbol, False))
        setattr(_kind, f"__r{_name}__", _arithmetic(_symbol, True))


def _tree(value: Any) -> Tree:
    return value.tree if isinstance(value, Followed) else float(value) if isinstance(value, float) else int(value)


def _length(tree: Tree) -> int:
    return 1 + _length(tree[1]) + _length(tree[2]) if type(tree) is tuple and len(tree) == 3 else 1


def watched(answer: Any, asked: Comparisons) -> Any:
    """The answer of a question for sizes, its integers as `Size`."""
    if type(answer) is int:
        return Size.of(answer, asked)
    if isinstance(answer, torch.Size):
        return torch.Size([Size.of(size, asked) for size in answer])
    return answer


def plain(value: Any) -> Any:
    """A size, a ratio, a shape or a slice of sizes as Python's own numbers; anything else as it is."""
    kind = type(value)
    if kind is Size:
        return int(value)
    if kind is Ratio:
        return float(value)
    if kind is torch.Size:
        return torch.Size([int(size) for size in value])
    return slice(plain(value.start), plain(value.stop), plain(value.step)) if kind is slice else value


@contextmanager
def lengths_followed() -> Iterator[None]:
    """Inside the block `len(x)` of a tensor is `x.shape[0]`, which a recording mode answers with a `Size`."""
    original = builtins.len

    def length(x: Any) -> int:
        return x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else original(x)

    with patched([(builtins, "len", length)]):
        yield


def guards(first: Comparisons, second: Comparisons, line: Callable[[int, int, str], Any]) -> tuple[BatchGuard, ...]:
    """What both runs answered alike and another batch size may answer otherwise, each once.

    A comparison that the two runs answer differently, or that one of them alone makes, is left out: the graphs are the
    same either way.

    Args:
        line: the line (`slope`, `offset`) through two sizes of the runs; the text is the place, for its error.
    """
    made: dict[tuple[str, bool], BatchGuard] = {}
    for place, ones in first.found.items():
        for (one, holds), (other, held) in zip(ones, second.found.get(place, ()), strict=False):
            if holds is held and one != other and _shape(one) == _shape(other):
                text = _text(one, other, lambda a, b, place=place: line(a, b, place))  # type: ignore[misc]
                made.setdefault((text, holds), BatchGuard(text, holds, place))
    return tuple(made.values())


def _shape(tree: Tree) -> Any:
    """The tree without its numbers."""
    if type(tree) is not tuple:
        return tree
    return "size" if len(tree) == 2 else (tree[0], _shape(tree[1]), _shape(tree[2]))


def _text(one: Tree, other: Tree, line: Callable[[int, int], Any], inside: bool = False) -> str:
    """The expression of two trees of one shape, in the batch size N."""
    if type(one) is not tuple:
        return repr(one) if one >= 0 else f"({one!r})"
    if len(one) == 2:
        found = line(one[1], other[1])
        return _line_text(found.slope, found.offset)
    text = f"{_text(one[1], other[1], line, True)} {one[0]} {_text(one[2], other[2], line, True)}"
    return f"({text})" if inside else text


def _line_text(slope: int, offset: int) -> str:
    if not slope:
        return str(offset)
    text = "N" if slope == 1 else f"{slope} * N"
    return text if not offset and slope == 1 else f"({text})" if not offset else f"({text} + {offset})"
