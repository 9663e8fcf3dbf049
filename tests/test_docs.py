"""The walkthrough runs, block after block; every Python block of the other pages parses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line it starts at."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def test_the_walkthrough_runs() -> None:
    page = ROOT / "docs/walkthrough.md"
    scope: dict[str, object] = {"__name__": "walkthrough"}
    found = blocks(page)
    assert len(found) >= 5
    for line, source in found:
        exec(compile("\n" * line + source, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_parse(page: Path) -> None:
    for _, source in blocks(page):
        ast.parse(source)
