"""The HTML page: what stands in it, and what a real browser makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from snnpart.report import Report, build
from snnpart.report.data import GraphNode
from snnpart.report.drawing import comfortable, draw, drawings
from snnpart.report.html import page
from snnpart.report.svg import colour
from tests.report import browser
from tests.report.example import compiled


@pytest.fixture
def report() -> Report:
    return build(compiled())


def chain(blocks: int) -> tuple[GraphNode, ...]:
    """`blocks` blocks of 25 nodes in two stages, with a skip in each."""
    nodes: list[GraphNode] = []
    for index in range(blocks * 25):
        block, place = divmod(index, 25)
        module = f"layer{block // 10}.{block}.part{place}" if place else f"layer{block // 10}.{block}"
        inputs = tuple(i for i in (index - 1, index - 25 if not place else -1) if i >= 0)
        stage = int(block >= blocks // 2)
        nodes.append(GraphNode(f"n{index}", stage, module, "add", "operation", (2, 3), "R", 1.0, inputs))
    return tuple(nodes)


def test_page_loads_nothing(report: Report) -> None:
    html = page(report)
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)", html)


def test_text_of_the_network_cannot_break_the_page(report: Report) -> None:
    html = page(report)
    assert "self.deep is &lt;True&gt;" in html and "<True>" not in html


def test_levels_go_from_coarse_to_fine(report: Report) -> None:
    levels = drawings(report)
    counts = [len(level.boxes) for level in levels]
    assert counts == sorted(set(counts)) and levels[-1].level == "every node"
    assert comfortable(levels) == len(levels) - 1


def test_each_node_is_in_one_box_and_boxes_do_not_overlap(report: Report) -> None:
    for level in drawings(report):
        members = sorted(index for box in level.boxes for index in box.members)
        assert members == list(range(len(report.graph)))
        assert len({(box.x, box.y) for box in level.boxes}) == len(level.boxes)


def test_2500_nodes_collapse_by_module() -> None:
    graph = chain(100)
    assert len(draw(graph, 1, "").boxes) == 10
    middle = draw(graph, 2, "")
    assert len(middle.boxes) == 100 and len(middle.columns) == 2
    below = [line for line in middle.lines if not line.crossing]
    assert all(middle.boxes[line.target].y > middle.boxes[line.source].y for line in below)


def test_a_loop_over_shared_boxes_is_drawn_back() -> None:
    steps = [GraphNode(f"{m}{t}", 0, m, "op", "operation", (), "", 0.0, ()) for t in range(2) for m in ("a", "b")]
    steps = [
        n if i == 0 else GraphNode(n.name, 0, n.module, "op", "operation", (), "", 0.0, (i - 1,))
        for i, n in enumerate(steps)
    ]
    lines = {(line.source, line.target): line.back for line in draw(steps, 1, "").lines}
    assert lines == {(0, 1): False, (1, 0): True}


@browser.needs_browser
def test_browser_draws_stages_collectives_and_boundaries(report: Report, tmp_path: Path) -> None:
    dom = browser.dom(report.write(tmp_path / "report.html"), tmp_path / "profile")
    (shown,) = [part for part in re.findall(r"<svg[^>]*>.*?</svg>", dom, re.S) if " hidden" not in part.split(">")[0]]
    boxes = re.findall(r'<g class="box ([^"]*)" data-stage="(\d)".*?<rect[^>]*fill="([^"]*)"', shown, re.S)
    assert len(boxes) == len(report.graph)
    assert all(fill == colour(int(stage)) for _, stage, fill in boxes) and {stage for _, stage, _ in boxes} == {
        "0",
        "1",
    }
    assert [kind for kind, _, _ in boxes].count("collective") == 2 == shown.count('class="collective-mark"')
    assert shown.count('class="edge crossing"') == 1 and "1.0 KiB →" in shown
    assert "weight: S(0) 4+4" in dom and "spare.weight" in dom
    assert re.search(r'viewBox="-10 0 \d+ [\d.]+"', shown), "the script has fitted the drawing"


@browser.needs_browser
def test_browser_paints_the_page(report: Report, tmp_path: Path) -> None:
    image = tmp_path / "page.png"
    browser.screenshot(report.write(tmp_path / "report.html"), image, tmp_path / "profile")
    pixels = _pixels(image)
    for stage in range(2):
        red, green, blue = (int(colour(stage)[i : i + 2], 16) for i in (1, 3, 5))
        match = (pixels == torch.tensor([red, green, blue])).all(-1).sum()
        assert match > 2000, f"stage {stage} is not on the picture"
    assert (pixels == torch.tensor([0xC6, 0x28, 0x28])).all(-1).sum() > 200, "no collective is marked"


def _pixels(image: Path) -> torch.Tensor:
    """[height, width, 3] of an image file, 0..255."""
    pictures = pytest.importorskip("PIL.Image")
    with pictures.open(image) as opened:
        return (
            torch.frombuffer(bytearray(opened.convert("RGB").tobytes()), dtype=torch.uint8)
            .reshape(opened.height, opened.width, 3)
            .to(torch.int64)
        )
