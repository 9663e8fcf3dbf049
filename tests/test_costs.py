"""The machine profile: its arithmetic, its text, its defaults, and a measurement."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snnpart import costs
from snnpart.costs import Link, MachineProfile
from snnpart.errors import ConfigError

PROFILE = MachineProfile(
    name="toy", flops={"float32": 1e9, "float64": 5e8}, copy=1e9, launch_us=3.0, links={"tp": Link(1e6, 10.0)}
)


def test_a_kernel_is_bound_by_arithmetic_or_by_memory() -> None:
    assert PROFILE.kernel_us(2e6, 0) == pytest.approx(3 + 2000)
    assert PROFILE.kernel_us(2e6, 0, torch.float64) == pytest.approx(3 + 4000)
    assert PROFILE.kernel_us(0, 5e6) == pytest.approx(3 + 5000)
    assert PROFILE.kernel_us(2e6, 0, torch.bfloat16) == pytest.approx(3 + 4000), (
        "an unlisted dtype is as slow as the slowest"
    )


def test_collectives_are_rings() -> None:
    assert PROFILE.send_us("tp", 100) == pytest.approx(10 + 100)
    assert PROFILE.all_gather_us("tp", 400, 4) == pytest.approx(3 * (10 + 100))
    assert PROFILE.all_reduce_us("tp", 400, 4) == pytest.approx(6 * (10 + 100))
    assert PROFILE.all_reduce_us("tp", 400, 1) == 0
    with pytest.raises(ConfigError, match="no link for the mesh axis 'pp'"):
        PROFILE.send_us("pp", 1)


def test_a_measured_link_goes_before_the_formulas() -> None:
    """Between the points straight lines, beyond them the last line, below them the smallest message's time."""
    measured = {
        "all_gather/2": ((100.0, 10.0), (200.0, 20.0), (400.0, 80.0)),
        "all_reduce/2": ((100.0, 15.0), (300.0, 35.0)),
        "reduce_scatter/2": ((100.0, 50.0), (300.0, 70.0)),
        "gather_1_bit/2": ((100.0, 3.0), (200.0, 5.0)),
        "gather_4_bits/2": ((100.0, 6.0), (200.0, 14.0)),
    }
    profile = replace(PROFILE, links={"tp": Link(1e6, 10.0, measured)})
    gathers = {size: profile.all_gather_us("tp", size, 2) for size in (10, 100, 150, 300, 500)}
    assert gathers == pytest.approx({10: 10, 100: 10, 150: 15, 300: 50, 500: 110})
    assert profile.all_gather_us("tp", 400, 4) == PROFILE.all_gather_us("tp", 400, 4), "measured over two ranks only"
    assert profile.reduce_scatter_us("tp", 300, 2) == 35, "an all-reduce can stand for it"
    assert profile.gather_bits_us("tp", 50, 3, 200, 2) == pytest.approx(5 + 9 * 2 / 3)
    assert MachineProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("profile", [PROFILE, *costs.BUILT_IN.values()], ids=lambda p: p.name)
def test_json_round_trip(profile: MachineProfile) -> None:
    assert MachineProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a machine profile"),
        ("[]", "not a machine profile"),
        ('{"version": 9}', "profile version 9 is not 1"),
        ('{"version": 1, "name": "x"}', "not a machine profile"),
        ('{"version": 1, "name": "x", "flops": {"float32": -1}, "copy": 1, "launch_us": 0}', "needs positive rates"),
    ],
)
def test_bad_json_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MachineProfile.from_json(text)


def test_default_profile_does_not_depend_on_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert costs.default_profile() is costs.CPU and costs.default_profile("h200") is costs.H200
    assert {"tp", "pp", "dp"} <= set(costs.CPU.links) & set(costs.H200.links)
    with pytest.raises(ConfigError, match="no built-in machine profile 'abacus'"):
        costs.default_profile("abacus")


def test_a_cpus_cache_is_its_largest(tmp_path: Path) -> None:
    assert costs._last_level_cache(5.0, tmp_path) == 5.0
    for name, level, size in (
        ("index0", "1", "32K"),
        ("index2", "2", "1M\n"),
        ("index3", "3", "36608K"),
        ("odd", "", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "level").write_text(level)
        (tmp_path / name / "size").write_text(size)
    (tmp_path / "index4").mkdir()  # one that tells nothing
    assert costs._last_level_cache(5.0, tmp_path) == 36608 * 1024


@pytest.mark.all
def test_a_measurement_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = costs.measured_profile()
    assert first.flops["float32"] > 1e8 and first.copy > 1e7 and 0 < first.launch_us < 1e4 and first.cache > 1e5
    assert costs.measured_profile() == first
    assert len(list((tmp_path / "snnpart").iterdir())) == 1


def test_a_file_of_the_cache_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees the old text until the new one is all there."""
    path, seen = tmp_path / "cache" / "profile.json", []
    costs.keep(path, "old")
    real = os.replace

    def replaced(source: str, target: Path) -> None:
        seen.append((path.read_text(), Path(source).read_text()))
        real(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    costs.keep(path, "new")
    assert seen == [("old", "new")] and path.read_text() == "new" and list(path.parent.iterdir()) == [path]
