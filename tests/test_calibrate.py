"""Efficiencies by kind of operation: measured once, kept in the cache, used by the analysis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from snnpart import calibrate, costs, parallelize
from snnpart.costs import CPU

KINDS = {"conv", "norm", "linear", "matmul", "pool", "elementwise", "surrogate", "reduction"}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference network that takes no time, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "measure_profile", lambda device: CPU)
    for name, value in {"STEPS": 1, "BATCH": 2, "SIZE": 8}.items():
        monkeypatch.setattr(calibrate, name, value)


def test_every_kind_has_an_efficiency_that_is_measured_once() -> None:
    first = calibrate.calibrated_profile()
    assert set(first.scales) >= KINDS
    assert all(there > 0 and back > 0 for there, back in first.scales.values())
    assert calibrate.calibrated_profile() == first == costs.measured_profile()
    assert calibrate.calibrated_profile(again=True).scales.keys() == first.scales.keys()


def test_times_follow_the_efficiencies() -> None:
    """Convolutions twice as slow, everything else as the rates say."""
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh()), torch.randn(2, 4, 8, 8)

    def conv_us(profile: costs.MachineProfile) -> float:
        program = parallelize(model, example_inputs=x, verify="off", profile=profile)
        return program.compiled.stage(0, 0).predicted_us

    slower = replace(CPU, scales={"conv": (2.0, 2.0)})
    only = parallelize(nn.Conv2d(4, 8, 3), example_inputs=x, verify="off", profile=CPU).compiled.stage(0, 0)
    assert conv_us(slower) - conv_us(CPU) == pytest.approx(only.predicted_us)
