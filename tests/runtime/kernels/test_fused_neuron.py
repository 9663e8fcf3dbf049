"""Fused neurons' kernels, in Triton's interpreter on the CPU: they give what the separate operations give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.runtime.kernels import expressions
from tests.runtime.kernels.fused import SHARED, SHORT, Case, cases, plan
from tests.runtime.kernels.rounded import CASES as ROUNDED
from tests.runtime.kernels.rounded import KEPT

triton = pytest.importorskip("triton")
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(_VERSION < (3, 7), reason="the interpreter of this Triton cannot loop under numpy 2.4")


def lines_of(part: str, module: str = "fused") -> list[dict[str, Any]]:
    """What the cases gave in a process of their own: Triton is told to interpret before it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.runtime.kernels.{module}", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@cache
def reports(part: str) -> dict[tuple[str, bool], Any]:
    """The reports by case and layout."""
    return {(line["case"], line["last"]): line for line in lines_of(part)}


def check(report: dict[str, Any], known: Mapping[str, Case] | None = None) -> None:
    assert report["fused"] == 1
    assert 0.01 < report["rate"] < 0.99
    assert report["silent"] == []
    limit = 1e-9 if str((known or cases())[report["case"]].dtype) == "torch.float64" else 1e-5
    assert {key: value for key, value in report["errors"].items() if value > limit} == {}


@pytest.mark.parametrize(("name", "channels_last"), [one for one in plan() if one[0] in SHORT])
def test_kernels_give_what_the_separate_operations_give(name: str, channels_last: bool) -> None:
    check(reports("short")[name, channels_last])


@pytest.mark.all
@pytest.mark.parametrize(("name", "channels_last"), [one for one in plan() if one[0] not in SHORT])
def test_so_do_those_of_every_other_neuron(name: str, channels_last: bool) -> None:
    check(reports("long")[name, channels_last])


@pytest.mark.parametrize("part", ["short", pytest.param("long", marks=pytest.mark.all)])
def test_so_do_operations_that_triton_has_no_word_for_and_tensors_with_two_names(part: str) -> None:
    found, known = lines_of(part, "expressions"), expressions.cases()
    wanted = {name for name in known if (name in expressions.SHORT) is (part == "short")}
    assert {line["case"] for line in found} == wanted
    for line in found:
        check(line, known)


@pytest.mark.all
def test_two_ranks_share_statistics_in_kernels_as_without() -> None:
    """Uneven ranks; the statistics and their gradients are sums over both."""
    found = lines_of("shared")
    assert sorted((line["rank"], line["case"]) for line in found) == sorted((r, c) for r in (0, 1) for c in SHARED)
    for line in found:
        check(line)


@pytest.mark.all
def test_states_are_rounded_as_the_text_in_plain_torch_rounds_them() -> None:
    """Rounding changes something, so that the two could differ."""
    found = lines_of("", "rounded")
    assert {line["case"] for line in found} == {name for name in ROUNDED if name in cases()}
    for line in found:
        limit = 1e-9 if str(cases()[line["case"]].dtype) == "torch.float64" else 1e-5
        assert {key: value for key, value in line["errors"].items() if value > limit} == {}, line["case"]
        assert line["moved"] > limit and 0.01 < line["rate"] < 0.99, line["case"]


def test_rounded_states_are_kept_in_their_dtype_bit_for_bit() -> None:
    found = lines_of("kept", "rounded")
    assert [(line["case"], line["state"]) for line in found] == list(KEPT)
    for line in found:
        assert line["same"] and f"torch.{line['state']}" in line["dtypes"], line["case"]
