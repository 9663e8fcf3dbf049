"""The report for a terminal, through rich."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from snnpart.report.data import Report
from snnpart.report.sections import Section, heading, sections


def render(report: Report, width: int = 120) -> str:
    """The whole report as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False, highlight=False)
    console.print(renderable(report))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def renderable(report: Report) -> Group:
    """The whole report for a rich console."""
    return Group(Text(heading(report)), *[_section(section) for section in sections(report)])


def _section(section: Section) -> RenderableType:
    if not section.columns:
        return Group(Text(f"\n{section.title}", style="bold"), *[Text(f"  {line}") for (line,) in section.rows])
    table = Table(title=f"\n{section.title}", title_justify="left", title_style="bold", header_style="")
    for column in section.columns:
        numeric = column.startswith(">")
        table.add_column(Text(column.lstrip(">")), justify="right" if numeric else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*[Text(cell) for cell in row])
    return table
