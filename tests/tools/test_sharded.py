"""tools/bench/sharded.py: every network of both zoos is shared as far as is asked, or stands among the exceptions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from snnpart.facts import Placement
from tests.tools.test_zoo import REFUSED
from tests.zoo import SMALL, ZOO, Model
from tools.zoo.catalogue import ZOO as PUBLIC

SCRIPT = Path(__file__).parents[2] / "tools/bench/sharded.py"
QUICK = [
    name
    for name in (*SMALL, "B01-ADD", "B02", "B05", "B09-vgg", "B10-depthwise", "B11-eval", "B15-hidden", "B19-flattened")
    if name in {**ZOO, **PUBLIC} and not name.startswith("sew_resnet18")
]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("bench_sharded", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _load()


def every() -> list[Any]:
    names = [name for name in bench.models() if name not in REFUSED]
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.all]) for name in names]


@pytest.mark.parametrize("name", every())
def test_products_and_parameters_are_shared(name: str) -> None:
    """At least 95 % of the flops and 90 % of the parameters; an exception has less, or it is none any more."""
    found = bench.share(bench.placed(bench.models()[name]))
    assert found.enough != (name in bench.EXCEPTIONS), found


def test_exceptions_are_networks_with_reasons() -> None:
    assert set(bench.EXCEPTIONS) <= {*ZOO, *PUBLIC} and all(bench.EXCEPTIONS.values())


def test_what_stays_whole_is_counted() -> None:
    """A layer of one channel cannot be dealt out: its flops and parameters are missing from the shares."""
    module = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Tanh(), nn.Linear(1, 6, bias=False))
    graph = bench.placed(Model(lambda: module, ((2, 6),)))
    for node in graph.graph.nodes:
        if node.name == "linear":
            bench.facts.put(node, Placement("replicate", bench.facts.Replicated()))
    found = bench.share(graph)
    assert found.flops == pytest.approx(0.5) and not found.enough
    assert found.whole["0 (flops)"] == pytest.approx(0.5)
