"""The doctor's findings and what counts as ill."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from snnpart import doctor


def test_what_is_here_is_found() -> None:
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["torch"].found == importlib.metadata.version("torch") and not found["torch"].mend
    assert {"python", "scipy", "cpu", "gloo", "spikingjelly", "c++"} <= set(found)
    assert doctor.healthy(tuple(found.values()))


def test_a_missing_extra_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "snntorch" else "99.9")
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["snntorch"].mend == "pip install 'snnpart[snntorch]'" and found["snntorch"].found == "missing"
    assert doctor.healthy(tuple(found.values())), "an optional package is not needed"


def test_an_old_requirement_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: "2.3.0+cpu" if name == "torch" else "99.9")
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["torch"].found == "2.3.0+cpu, older than 2.11" and found["torch"].mend == "pip install 'torch>=2.11'"
    assert not doctor.healthy(tuple(found.values()))


def test_a_missing_program_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["chromium"].mend == "apt-get install chromium"


def test_links_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    found = {finding.name: finding.found for finding in doctor._links()}
    assert found["cuda:0"] == "direct access to 1" and found["cuda:2"] == "direct access to no other device"
