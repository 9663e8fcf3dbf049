"""Literals of the text form: what may stand among the arguments of a node.

None True False 3 -1.5 inf nan "text" ... (1, 2) (1,) [1, 2] {"k": 1} slice(0, None, 2) complex(0.0, 1.0)
torch.float32 torch.channels_last torch.strided device("cpu") tuple of class m:Point(1, 2) %node
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.errors import ConfigError
from snnpart.text import functions
from snnpart.text.lexer import Line

LEAF = type("Leaf", (), {"__repr__": lambda self: "*"})()
"""Stands for a tensor in a printed structure (`in_spec`, `out_spec`)."""

_CONSTANT_TYPES = (torch.dtype, torch.memory_format, torch.layout)
FACTS = {
    kind.__name__: kind
    for kind in (
        facts.State, facts.TimeRole, facts.Domain, facts.Cost, facts.LeafMemory, facts.Block, facts.Replicated,
        facts.Sharded, facts.Partial, facts.Placement, facts.Stage, facts.Copy, facts.Checkpoint, facts.Gathers,
    )
}  # fmt: skip


@cache
def _constants() -> dict[str, Any]:
    return {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, _CONSTANT_TYPES)}


def write(value: Any) -> str:
    """The text of a literal.

    Raises:
        ConfigError: a value of this type has no text form.
    """
    for kind, writer in _WRITERS:
        if isinstance(value, kind):
            return writer(value)
    if value is None or value is Ellipsis or value is LEAF:
        return "..." if value is Ellipsis else repr(value)
    if is_dataclass(value) and type(value).__name__ in FACTS:
        return write_fact(value)
    raise ConfigError(f"a {type(value).__name__} has no text form: {value!r:.80}")


def write_fact(fact: Any) -> str:
    """A fact as `Name(field=value)`; fields at their default are left out."""
    given = [(f.name, getattr(fact, f.name)) for f in fields(fact) if getattr(fact, f.name) != f.default]
    return f"{type(fact).__name__}({', '.join(f'{name}={write(value)}' for name, value in given)})"


def _write_tuple(value: tuple[Any, ...]) -> str:
    inner = ", ".join(write(item) for item in value)
    if hasattr(value, "_fields"):
        return f"class {functions.class_path(type(value))}({inner})"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def _write_mapping(value: Mapping[Any, Any]) -> str:
    return "{" + ", ".join(f"{write(key)}: {write(item)}" for key, item in value.items()) + "}"


_WRITERS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (fx.Node, lambda v: f"%{v.name}"),
    (bool, repr),
    (int, int.__repr__),
    (float, float.__repr__),
    (str, json.dumps),
    (tuple, _write_tuple),
    (list, lambda v: "[" + ", ".join(write(item) for item in v) + "]"),
    (Mapping, _write_mapping),
    (slice, lambda v: f"slice({write(v.start)}, {write(v.stop)}, {write(v.step)})"),
    (complex, lambda v: f"complex({v.real!r}, {v.imag!r})"),
    (torch.device, lambda v: f'device("{v}")'),
    (_CONSTANT_TYPES, str),
)


class Reader:
    """Reads literals of lines. `nodes` resolves `%name`; `modules` limits where classes are imported from."""

    def __init__(self, nodes: Mapping[str, fx.Node], modules: Collection[str] | None) -> None:
        self.nodes, self.modules = nodes, modules

    def read(self, line: Line) -> Any:
        token = line.peek
        reader = {
            "string": self._string, "number": self._number, "node": self._node, "name": self._name,
            "ellipsis": lambda _: Ellipsis if line.next() else None, "mark": self._bracket,
        }.get(token.kind)  # fmt: skip
        if reader is None:
            raise line.error(f"a value is expected here, not '{token.text or 'the end of the line'}'")
        return reader(line)

    def _string(self, line: Line) -> str:
        return read_string(line)

    def _number(self, line: Line) -> int | float:
        text = line.next().text
        return int(text) if text.lstrip("-").isdigit() else float(text)

    def _node(self, line: Line) -> fx.Node:
        name = line.peek.text[1:]
        if name not in self.nodes:
            raise line.error(f"%{name} is not defined above")
        line.next()
        return self.nodes[name]

    def _bracket(self, line: Line) -> Any:
        if line.take("*"):
            return LEAF
        if line.take("("):
            return self._tuple(line)
        if line.take("["):
            return self.sequence(line, "]")
        line.expect("{")
        return self._mapping(line)

    def _tuple(self, line: Line) -> tuple[Any, ...]:
        return tuple(self.sequence(line, ")"))

    def sequence(self, line: Line, close: str) -> list[Any]:
        """Values up to `close`, which is consumed; a trailing comma is allowed."""
        items: list[Any] = []
        while not line.take(close):
            items.append(self.read(line))
            if not line.take(","):
                line.expect(close)
                break
        return items

    def _mapping(self, line: Line) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        while not line.take("}"):
            key = self.read(line)
            line.expect(":")
            items[key] = self.read(line)
            if not line.take(","):
                line.expect("}")
                break
        return items

    def _name(self, line: Line) -> Any:
        token = line.next()
        words = {"None": None, "True": True, "False": False}
        if token.text in words:
            return words[token.text]
        if token.text == "class":
            return self._named_tuple(line)
        if token.text in _constants():
            return _constants()[token.text]
        if line.take("("):
            return self._construct(line, token.text, token.column)
        raise line.error(f"'{token.text}' is no value", token.column)

    def _named_tuple(self, line: Line) -> Any:
        kind = self.named_tuple_class(line)
        line.expect("(")
        return kind(*self.sequence(line, ")"))

    def named_tuple_class(self, line: Line) -> Any:
        """The NamedTuple class at the cursor."""
        token = line.need("class", "a class (module:name)")
        try:
            kind = functions.import_class(token.text, tuple, self.modules)
        except ConfigError as error:
            raise line.error(str(error), token.column) from error
        if not hasattr(kind, "_fields"):
            raise line.error(f"'{token.text}' is not a NamedTuple", token.column)
        return kind

    def _construct(self, line: Line, name: str, column: int) -> Any:
        if name in FACTS:
            return self._fact(line, name, column)
        makers: dict[str, Callable[..., Any]] = {"slice": slice, "complex": complex, "device": torch.device}
        if name not in makers:
            raise line.error(f"'{name}' cannot be made here", column, choices=[*makers, *FACTS])
        try:
            return makers[name](*self.sequence(line, ")"))
        except (TypeError, RuntimeError) as error:
            raise line.error(f"{name}: {error}", column) from error

    def _fact(self, line: Line, name: str, column: int) -> Any:
        given = self.keywords(line)
        try:
            return FACTS[name](**given)
        except TypeError as error:
            raise line.error(str(error), column) from error

    def keywords(self, line: Line) -> dict[str, Any]:
        """`name=value` pairs up to the closing parenthesis, which is consumed."""
        given: dict[str, Any] = {}
        while not line.take(")"):
            key = line.need("name", "a keyword").text
            line.expect("=")
            given[key] = self.read(line)
            if not line.take(","):
                line.expect(")")
                break
        return given


def read_string(line: Line) -> str:
    """The quoted string at the cursor."""
    token = line.need("string", "a quoted string")
    try:
        return str(json.loads(token.text))
    except json.JSONDecodeError as error:
        raise line.error(f"this string is not JSON: {error.msg}", token.column) from error


def write_path(path: str) -> str:
    """A dotted path bare, anything else in quotes."""
    plain = path and all(part.isidentifier() or part.isdigit() for part in path.split("."))
    return path if plain else json.dumps(path)


def read_path(line: Line) -> str:
    """A dotted path or a quoted string."""
    if line.peek.kind == "string":
        return read_string(line)
    if line.peek.kind == "number":
        return line.next().text
    return line.need("name", "a name").text
