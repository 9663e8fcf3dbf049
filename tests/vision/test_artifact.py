"""The artifact: for the plain module and any topology, without pickle; what was changed or cut short is refused."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from snnpart.errors import CheckpointError
from snnpart.vision.artifact import Artifact, load_artifact, write
from tests.vision.nets import Digits, Plain


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    write(tmp_path / "artifact", Plain().state_dict(), {"model": "tests.vision.nets:Plain", "batch_size": 4})
    return tmp_path / "artifact"


def test_it_loads_into_the_plain_module(artifact: Path) -> None:
    torch.manual_seed(3)
    model = Plain()
    loaded = load_artifact(artifact)
    loaded.load_into(model)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert loaded.metadata["model"] == "tests.vision.nets:Plain"
    assert "batch_size" not in loaded.metadata, "it says how the network is made, not how it was trained"
    assert {path.name for path in artifact.iterdir()} == {"artifact.json", "model.safetensors"}


def test_another_network_is_refused(artifact: Path) -> None:
    with pytest.raises(CheckpointError, match="the weights do not fit"):
        load_artifact(artifact).load_into(Digits())


def test_reading_imports_nothing(artifact: Path) -> None:
    """The factory's name is text: one that does not exist is no error here."""
    write(artifact, Plain().state_dict(), {"model": "evil_module_that_is_not_there:run"})
    assert isinstance(load_artifact(artifact), Artifact)


def test_damage_anywhere_is_refused(artifact: Path) -> None:
    numbers = random.Random(1)
    for name in ("artifact.json", "model.safetensors"):
        path = artifact / name
        whole = path.read_bytes()
        for position in [0, len(whole) - 1, *(numbers.randrange(len(whole)) for _ in range(48))]:
            data = bytearray(whole)
            data[position] ^= 1 << (position % 8)
            path.write_bytes(bytes(data))
            with pytest.raises(CheckpointError, match=name):
                load_artifact(artifact)
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=name):
                load_artifact(artifact)
        path.write_bytes(whole)
    load_artifact(artifact)


def test_a_changed_factory_with_a_matching_checksum_of_the_weights_is_refused(artifact: Path) -> None:
    path = artifact / "artifact.json"
    data = json.loads(path.read_text())
    data["head"]["model"] = "os:system"
    path.write_text(json.dumps(data, indent=1))
    with pytest.raises(CheckpointError, match=r"artifact\.json is damaged"):
        load_artifact(artifact)


def test_a_full_disk_leaves_the_old_one(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_artifact(artifact).state_dict()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("snnpart.vision.artifact.save_file", full)
    with pytest.raises(CheckpointError, match="the artifact was not written: No space left on device"):
        write(artifact, Plain().state_dict(), {})
    monkeypatch.undo()
    assert all(torch.equal(before[name], tensor) for name, tensor in load_artifact(artifact).state_dict().items())
    assert not list(artifact.parent.glob(".*")), "something was left behind"


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not an artifact"):
        write(tmp_path, Plain().state_dict(), {})
    assert (tmp_path / "notes.txt").read_text() == "mine"
