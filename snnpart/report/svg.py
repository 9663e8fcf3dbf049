"""The drawing as inline SVG: stages as colours, collectives marked, boundaries with their bytes."""

from __future__ import annotations

from collections import Counter
from html import escape

from snnpart.report.data import GraphNode, Report
from snnpart.report.drawing import HEIGHT, WIDTH, Box, Drawing, Line
from snnpart.report.sections import duration, size

COLOURS = ("#cfe3ff", "#ffe0b8", "#d3f0d0", "#f3d3ee", "#fff3b0", "#d5eef0", "#e6dcc8", "#e0d9f7")
"""Fill of stage 0, 1, ...; they repeat after the last."""


def colour(stage: int) -> str:
    return COLOURS[stage % len(COLOURS)]


def svg(report: Report, drawing: Drawing, hidden: bool) -> str:
    """One level of detail as an `<svg>` element."""
    parts = [
        f'<svg class="level" data-level="{escape(drawing.level)}" viewBox="-10 0 {drawing.width + 20} '
        f'{drawing.height + 10}" {"hidden" if hidden else ""}>',
        '<g class="view">',
        *[_column(report, drawing, index) for index in range(len(drawing.columns))],
        *[_line(drawing, line) for line in drawing.lines],
        *[_box(report, box) for box in drawing.boxes],
        *[_boundary(report, drawing, index) for index in range(len(report.boundaries))],
        "</g></svg>",
    ]
    return "\n".join(parts)


def _column(report: Report, drawing: Drawing, index: int) -> str:
    column = drawing.columns[index]
    row = next((s for s in report.stages if s.index == column.stage), None)
    times = f" · {duration(row.predicted_us)} · {size(row.peak_bytes)}" if row is not None else ""
    return (
        f'<g class="stage" data-stage="{column.stage}"><rect x="{column.x}" y="2" width="{column.width}" '
        f'height="{drawing.height}" fill="{colour(column.stage)}" fill-opacity="0.28" rx="8"/>'
        f'<text x="{column.x + 12}" y="24">stage {column.stage}{times}</text></g>'
    )


def _line(drawing: Drawing, line: Line) -> str:
    source, target = drawing.boxes[line.source], drawing.boxes[line.target]
    kind = "crossing" if line.crossing else "back" if line.back else "plain"
    return f'<path class="edge {kind}" d="{_path(source, target, kind)}"/>'


def _path(source: Box, target: Box, kind: str) -> str:
    """From the bottom of one box to the top of the other, or from side to side."""
    if kind == "plain":
        x1, y1, x2, y2 = source.x + WIDTH // 2, source.y + HEIGHT, target.x + WIDTH // 2, target.y
        bend = max(12, (y2 - y1) // 2)
        aside = 0 if target.row - source.row <= 1 else WIDTH // 2 + 10
        return f"M{x1},{y1} C{x1 + aside},{y1 + bend} {x2 + aside},{y2 - bend} {x2},{y2}"
    x1, y1, y2 = source.x + WIDTH, source.y + HEIGHT // 2, target.y + HEIGHT // 2
    x2 = target.x if kind == "crossing" else target.x + WIDTH
    return f"M{x1},{y1} C{x1 + 50},{y1} {x2 + (-50 if kind == 'crossing' else 50)},{y2} {x2},{y2}"


def _box(report: Report, box: Box) -> str:
    members = [report.graph[index] for index in box.members]
    kinds = {node.kind for node in members}
    classes = " ".join(["box", *sorted(kinds)] if len(members) == 1 else ["box", "group"])
    moves = [node for node in members if node.kind == "collective"]
    ids = ",".join(map(str, box.members))
    return (
        f'<g class="{classes}" data-stage="{box.stage}" data-nodes="{ids}" transform="translate({box.x},{box.y})">'
        f"<title>{escape(_tip(box.label, members))}</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="{10 if "neuron" in kinds else 4}" fill="{colour(box.stage)}"/>'
        f'<text x="8" y="16" class="name">{escape(_short(box.label))}</text>'
        f'<text x="8" y="32" class="what">{escape(_short(_what(members), 27))}</text>{_mark(moves)}</g>'
    )


def _mark(moves: list[GraphNode]) -> str:
    """A red badge with the number of collectives in the box."""
    if not moves:
        return ""
    names = ", ".join(f"{count} x {name}" for name, count in Counter(m.operation for m in moves).items())
    return (
        f'<g class="collective-mark"><title>{escape(names)}</title><circle cx="{WIDTH - 13}" cy="13" r="10"/>'
        f'<text x="{WIDTH - 13}" y="17">{len(moves)}</text></g>'
    )


def _what(members: list[GraphNode]) -> str:
    if len(members) == 1:
        node = members[0]
        shape = "x".join(map(str, node.shape))
        return f"{node.operation} {node.placement} {shape}".replace("  ", " ")
    named = Counter(node.operation for node in members if node.kind in ("layer", "neuron"))
    listed = ", ".join(f"{count} {name}" for name, count in named.most_common(2))
    return listed or f"{len(members)} operations"


def _tip(label: str, members: list[GraphNode]) -> str:
    first = "\n".join(f"{node.operation} {node.placement} {list(node.shape)}" for node in members[:12])
    more = f"\n... {len(members) - 12} more" if len(members) > 12 else ""
    return f"{label}\n{first}{more}"


def _short(text: str, limit: int = 23) -> str:
    return text if len(text) <= limit else "…" + text[1 - limit :]


def _boundary(report: Report, drawing: Drawing, index: int) -> str:
    """What is sent, written between the two columns."""
    if index + 1 >= len(drawing.columns):
        return ""
    boundary, left, right = report.boundaries[index], drawing.columns[index], drawing.columns[index + 1]
    middle = (left.x + left.width + right.x) // 2
    return (
        f'<g class="boundary" data-bytes="{boundary.forward_bytes}"><text x="{middle}" y="18">'
        f"{size(boundary.forward_bytes)} →</text>"
        f'<text x="{middle}" y="34">← {size(boundary.backward_bytes)}</text></g>'
    )
