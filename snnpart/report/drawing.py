"""The graph laid out for the page: boxes and lines with coordinates, at several levels of detail.

At level d the nodes of a module path longer than d atoms share one box per stage; what a container computes by itself
(a residual addition) is a box of its own. Stages stand side by side as columns; inside one, a box stands below
everything it reads. Lines that would point upwards (a time loop, once its steps share a box) are kept as `back` lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from snnpart.report.data import GraphNode, Report

WIDTH, HEIGHT = 168, 40
GAP_X, GAP_Y, COLUMN_GAP, TOP = 16, 26, 110, 46
ACROSS = 5
EVERY_NODE = 700
COMFORTABLE = 64

Key = tuple[int, str, str]


@dataclass(slots=True)
class Box:
    """One or more nodes of a stage, at (x, y) from the top left."""

    stage: int
    label: str
    members: list[int] = field(default_factory=list)
    row: int = 0
    x: int = 0
    y: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """From box to box (indices); `crossing` when the value leaves its stage, `back` when it points upwards."""

    source: int
    target: int
    crossing: bool
    back: bool


@dataclass(frozen=True, slots=True)
class Column:
    """A stage's column."""

    stage: int
    x: int
    width: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """One level of detail."""

    level: str
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    width: int
    height: int


def drawings(report: Report) -> tuple[Drawing, ...]:
    """The levels worth showing, coarse to fine: each has more boxes than the one before."""
    depth = max((len(_atoms(node)) for node in report.graph), default=0)
    levels = [draw(report.graph, d, f"{d} level{'s' if d > 1 else ''} of modules") for d in range(1, depth + 1)]
    if len(report.graph) <= EVERY_NODE:
        levels.append(draw(report.graph, None, "every node"))
    kept: list[Drawing] = []
    for level in levels:
        if not kept or len(level.boxes) > len(kept[-1].boxes):
            kept.append(level)
    return tuple(kept)


def comfortable(levels: Sequence[Drawing]) -> int:
    """The index of the level to open with: the finest with at most COMFORTABLE boxes."""
    fitting = [index for index, level in enumerate(levels) if len(level.boxes) <= COMFORTABLE]
    return fitting[-1] if fitting else 0


def draw(graph: Sequence[GraphNode], depth: int | None, level: str) -> Drawing:
    """The graph with modules collapsed below `depth` (None: every node by itself)."""
    containers = {".".join(atoms[:i]) for atoms in map(_atoms, graph) for i in range(len(atoms))}
    keys: dict[Key, int] = {}
    boxes: list[Box] = []
    home: list[int] = []
    for index, node in enumerate(graph):
        key = _key(node, depth, containers)
        if key not in keys:
            keys[key] = len(boxes)
            boxes.append(Box(node.stage, key[1] or key[2]))
        home.append(keys[key])
        boxes[keys[key]].members.append(index)
    lines = _lines(graph, boxes, home)
    columns, height = _place(boxes, lines)
    width = columns[-1].x + columns[-1].width if columns else 0
    return Drawing(level, tuple(boxes), lines, columns, width, height)


def _atoms(node: GraphNode) -> list[str]:
    return node.module.split(".") if node.module else []


def _key(node: GraphNode, depth: int | None, containers: set[str]) -> Key:
    """Which box the node is in: stage, module prefix, and what tells boxes of one module apart."""
    atoms = _atoms(node)
    if depth is None or node.kind == "input":
        return (node.stage, "", node.name)
    if len(atoms) < depth and node.module in containers:
        path = f"{node.module} · " if node.module else ""
        return (node.stage, "", f"{path}{node.operation}")
    return (node.stage, ".".join(atoms[:depth]), "")


def _lines(graph: Sequence[GraphNode], boxes: list[Box], home: list[int]) -> tuple[Line, ...]:
    """One line for each pair of boxes with a value between them; sets the row of each box on the way."""
    pairs = dict.fromkeys((home[source], home[index]) for index, node in enumerate(graph) for source in node.inputs)
    lines = [
        Line(a, b, boxes[a].stage != boxes[b].stage, boxes[a].stage == boxes[b].stage and a > b)
        for a, b in pairs
        if a != b
    ]
    for line in sorted(lines, key=lambda line: line.target):
        if not line.crossing and not line.back:
            boxes[line.target].row = max(boxes[line.target].row, boxes[line.source].row + 1)
    return tuple(lines)


def _place(boxes: list[Box], lines: tuple[Line, ...]) -> tuple[tuple[Column, ...], int]:
    """Coordinates for every box; returns the columns and the height of the drawing."""
    columns, x, height = [], 0, TOP
    for stage in sorted({box.stage for box in boxes}):
        rows = _rows([box for box in boxes if box.stage == stage])
        width = max(len(row) for row in rows) * (WIDTH + GAP_X) + GAP_X
        for number, row in enumerate(rows):
            left = x + (width - len(row) * (WIDTH + GAP_X) + GAP_X) // 2
            for place, box in enumerate(row):
                box.x, box.y = left + place * (WIDTH + GAP_X), TOP + number * (HEIGHT + GAP_Y)
        columns.append(Column(stage, x, width))
        x += width + COLUMN_GAP
        height = max(height, TOP + len(rows) * (HEIGHT + GAP_Y))
    return tuple(columns), height


def _rows(boxes: list[Box]) -> list[list[Box]]:
    """The boxes by row; a row of more than ACROSS boxes becomes several."""
    by_row: dict[int, list[Box]] = {}
    for box in boxes:
        by_row.setdefault(box.row, []).append(box)
    return [row[start : start + ACROSS] for _, row in sorted(by_row.items()) for start in range(0, len(row), ACROSS)]
