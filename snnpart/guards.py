"""Comparisons of the batch size that a trace took as fixed, as data: `4 * N > 10` is False.

The text is arithmetic in numbers and N, the batch size, with one comparison outermost. It is read by Python's
parser and worked out here, operation by operation, so that a saved program cannot run code through it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from snnpart.errors import ConfigError

_OPERATIONS: dict[type[Any], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


@lru_cache(maxsize=4096)
def compares(text: str, batch: int) -> bool:
    """Whether the comparison is true at this batch size; one that cannot be worked out there (N // (N - 1)) is false.

    Raises:
        ConfigError: the text is no comparison of this kind.
    """
    try:
        return bool(_value(ast.parse(text, mode="eval").body, batch))
    except ZeroDivisionError:
        return False
    except (SyntaxError, KeyError, TypeError) as error:
        raise ConfigError(f"{text!r} is no comparison of the batch size N") from error


def _value(node: ast.expr, batch: int) -> Any:
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, batch), _value(node.right, batch))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _OPERATIONS[type(node.ops[0])](_value(node.left, batch), _value(node.comparators[0], batch))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, batch)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and node.id == "N":
        return batch
    raise TypeError(ast.dump(node))
