"""The report as one page. Style and script are files beside this one and go into the page; nothing is loaded."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files

from snnpart.report.data import Report
from snnpart.report.drawing import comfortable, drawings
from snnpart.report.sections import Section, heading, sections
from snnpart.report.svg import colour, svg


def page(report: Report) -> str:
    """The whole page as HTML."""
    here = files("snnpart.report")
    title = escape(f"snnpart: {report.network.name}")
    name, *rest = heading(report).splitlines()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{title}</title><style>{here.joinpath('page.css').read_text(encoding='utf-8')}</style></head><body>",
            f"<h1>{escape(name)}</h1>",
            *[f"<p>{escape(line)}</p>" for line in rest],
            _graph(report),
            *[_section(section) for section in sections(report)],
            f'<script type="application/json" id="nodes">{_nodes(report)}</script>',
            f"<script>{here.joinpath('page.js').read_text(encoding='utf-8')}</script></body></html>\n",
        ]
    )


def _graph(report: Report) -> str:
    levels = drawings(report)
    opened = comfortable(levels)
    options = "".join(
        f'<option value="{index}"{" selected" if index == opened else ""}>{escape(level.level)} '
        f"({len(level.boxes)} boxes)</option>"
        for index, level in enumerate(levels)
    )
    keys = "".join(
        f'<span class="key" style="background:{colour(stage.index)}">stage {stage.index}</span>'
        for stage in report.stages
    )
    return (
        f'<div id="bar"><label>Detail <select id="detail">{options}</select></label>{keys}'
        '<span class="key round">neurons</span><span class="key red">collectives</span>'
        '<button id="fit">Fit</button>'
        '<span class="hint">wheel zooms, drag moves, click a box for its nodes</span></div>'
        f'<div id="graph">{"".join(svg(report, level, i != opened) for i, level in enumerate(levels))}'
        '<div id="panel" hidden></div></div>'
    )


def _section(section: Section) -> str:
    if not section.columns:
        lines = "".join(f"<li>{escape(line)}</li>" for (line,) in section.rows)
        return f"<details open><summary>{escape(section.title)}</summary><ul>{lines}</ul></details>"
    heads = "".join(f"<th{_class(column)}>{escape(column.lstrip('>'))}</th>" for column in section.columns)
    rows = "".join(_row(section, row) for row in section.rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<details open><summary>{escape(section.title)} ({len(section.rows)})</summary>{table}</details>"


def _row(section: Section, row: tuple[str, ...]) -> str:
    cells = zip(section.columns, row, strict=True)
    return "<tr>" + "".join(f"<td{_class(column)}>{escape(cell)}</td>" for column, cell in cells) + "</tr>"


def _class(column: str) -> str:
    return ' class="number"' if column.startswith(">") else ""


def _nodes(report: Report) -> str:
    """Name, operation, placement, shape and time of each node, for the panel; `<` is escaped for the script element."""
    rows = [[n.name, n.operation, n.placement, list(n.shape), round(n.us, 1), n.module] for n in report.graph]
    return json.dumps(rows, separators=(",", ":")).replace("<", "\\u003c")
