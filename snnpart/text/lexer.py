"""Splits one line of the text form into tokens, and reports where a line cannot be read."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from snnpart.errors import ConfigError

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>\#.*)
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<node>%\w+)
    |(?P<tensor>@(?:"(?:[^"\\]|\\.)*"|[\w.]+))
    |(?P<leaf>&(?:"(?:[^"\\]|\\.)*"|[\w.]+))
    |(?P<growth>(?<=\d)[+-]\d*n\b)
    |(?P<number>-?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?![\w.])))
    |(?P<class>[A-Za-z_][\w.]*:[\w.<>]+)
    |(?P<ellipsis>\.\.\.)
    |(?P<method>\.\w+)
    |(?P<name>\w[\w.]*)
    |(?P<mark>[(){}\[\],=:?*])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of a line: its kind (a group of the lexer's expression), its text and column (from 1)."""

    kind: str
    text: str
    column: int


class Line:
    """A cursor over the tokens of one line."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.at = number, text, 0
        self.tokens = list(self._split())
        self.tokens.append(Token("end", "", len(text) + 1))

    def _split(self) -> list[Token]:
        found, position = [], 0
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise self.error(f"{self.text[position]!r} cannot begin anything", position + 1)
            kind = match.lastgroup or ""
            if kind not in ("space", "comment"):
                found.append(Token(kind, match.group(), position + 1))
            position = match.end()
        return found

    def error(self, what: str, column: int | None = None, choices: Collection[str] = ()) -> ConfigError:
        """The error for this line at `column` (None: at the cursor)."""
        at = self.peek.column if column is None else column
        where = f"line {self.number}, column {at}"
        return ConfigError(f"{what}\n  {self.text}\n  {' ' * (at - 1)}^", where=where, choices=choices)

    @property
    def peek(self) -> Token:
        return self.tokens[self.at]

    @property
    def done(self) -> bool:
        return self.peek.kind == "end"

    def next(self) -> Token:
        token = self.peek
        self.at += token.kind != "end"
        return token

    def take(self, text: str) -> bool:
        """Step over `text` if it is next."""
        found = self.peek.text == text and self.peek.kind != "string"
        self.at += found
        return found

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.error(f"'{text}' is expected here, not '{self.peek.text or 'the end of the line'}'")

    def need(self, kind: str, what: str) -> Token:
        if self.peek.kind != kind:
            raise self.error(f"{what} is expected here, not '{self.peek.text or 'the end of the line'}'")
        return self.next()

    def end(self) -> None:
        if not self.done:
            raise self.error(f"'{self.peek.text}' is left over")


def lines(text: str, first: int = 1) -> list[Line]:
    """The lines that hold something, numbered from `first`."""
    found = (Line(number, line) for number, line in enumerate(text.splitlines(), first))
    return [line for line in found if not line.done]
