"""Saved programs: what is written reads back equal, damage is named, nothing is half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from snnpart import artifact
from snnpart.api import load, parallelize
from snnpart.errors import CheckpointError
from snnpart.fingerprint import fingerprint
from snnpart.program import CompiledProgram
from snnpart.runtime.launch import launch
from tests.distributed.cases import CASES, Norms, det, fill
from tests.distributed.jobs import ramp, without_dropout
from tests.zoo import ZOO


def compiled_norms(**topology: Any) -> CompiledProgram:
    return parallelize(fill(Norms()), example_inputs=det(4, 2, 5, 5), verify="off", **topology).compiled


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    artifact.save(compiled_norms(tp=2, pp=2), tmp_path / "program")
    return tmp_path / "program"


def test_round_trip_of_every_part(saved: Path) -> None:
    compiled, loaded = compiled_norms(tp=2, pp=2), artifact.load(saved)
    assert loaded.plan == compiled.plan
    assert loaded.schedule == compiled.schedule
    assert fingerprint(loaded) == fingerprint(compiled)
    for key, stage in compiled.stages.items():
        other = loaded.stages[key]
        assert (other.reads, other.receives, other.sends, other.tensors) == (
            stage.reads,
            stage.receives,
            stage.sends,
            stage.tensors,
        )
    for name, info in compiled.source.tensors.items():
        again = loaded.source.tensors[name]
        assert torch.equal(again.tensor, info.tensor)
        assert (again.kind, again.tensor.requires_grad, again.used) == (info.kind, info.tensor.requires_grad, info.used)
    assert loaded.source.inputs == compiled.source.inputs
    assert loaded.source.outputs == compiled.source.outputs


@pytest.mark.parametrize("name", ["A01", "A26", "A28"])
def test_loaded_program_computes_the_same(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    x, y = case.batches()[0]
    compiled = parallelize(case.model(), example_inputs=x, verify="off", **case.options).compiled
    artifact.save(compiled, tmp_path / "p")
    found = []
    for program in (compiled, artifact.load(tmp_path / "p")):
        with launch(program, target_dim=case.target_dim) as running:
            loss = running.train_step(x, y, case.loss_fn(x.shape[case.batch_dim]))
            found.append((loss, running.gradients(), running.eval_step(x)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][2], found[1][2])
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(grad, found[1][1][key]) for key, grad in found[0][1].items())


@pytest.mark.parametrize(
    "name",
    [n for n in ("small_sew-m", "plif_mnist-m", "snntorch_rleaky", "norse_lsnn", "sinabs_layers", "tied") if n in ZOO],
)
def test_networks_of_every_framework_come_back(tmp_path: Path, name: str) -> None:
    """Neuron layers are described as data and made again without running the network's code."""
    model = ZOO[name]
    module, inputs = model.build()
    without_dropout(module)
    options: dict[str, Any] = {"in_dims": model.in_dims, "time_steps": model.steps, "verify": "off"}
    compiled = parallelize(module, example_inputs=inputs, **options).compiled
    artifact.save(compiled, tmp_path / "p")
    found = []
    for program in (compiled, artifact.load(tmp_path / "p")):
        with launch(program) as running:
            loss = running.train_step(inputs, torch.zeros(2), ramp)
            found.append((loss, running.gradients(), running.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    for before, after in zip(found[0][1:], found[1][1:], strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_no_pickle_and_only_named_files(saved: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    stages = {f"stage{s}_tp{r}.txt" for s in range(2) for r in range(2)}
    assert names == {"program.json", "plan.json", "source.txt", "weights.safetensors"} | stages
    assert json.loads((saved / "program.json").read_text())["modules"] == ["tests", "torch"]


@pytest.mark.parametrize("name", ["plan.json", "source.txt", "stage1_tp0.txt", "weights.safetensors"])
def test_damage_is_named(saved: Path, name: str) -> None:
    raw = bytearray((saved / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (saved / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        artifact.load(saved)
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        artifact.load(saved)


def edit(saved: Path, **changes: Any) -> None:
    head = json.loads((saved / "program.json").read_text())
    (saved / "program.json").write_text(json.dumps({**head, **changes}))


def test_other_versions_and_edited_programs(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        artifact.load(tmp_path / "nothing")
    head = json.loads((saved / "program.json").read_text())
    edit(saved, version=99)
    with pytest.raises(CheckpointError, match="version 99"):
        artifact.load(saved)
    edit(saved, version=2, schedule={**head["schedule"], "0": ["0F0", "0B0"]})
    with pytest.raises(CheckpointError, match="the schedule read back differ"):
        artifact.load(saved)


def test_classes_outside_the_allowed_packages(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="tests.neurons:Spike"):
        artifact.load(saved, modules=["torch"])


def test_files_outside_the_directory_are_not_read(saved: Path) -> None:
    head = json.loads((saved / "program.json").read_text())
    edit(saved, checksums={**head["checksums"], "../escape": "0"})
    with pytest.raises(CheckpointError, match="../escape is missing"):
        artifact.load(saved)


def test_saving_replaces_programs_only(saved: Path, tmp_path: Path) -> None:
    trained = {name: info.tensor.detach() + 1 for name, info in compiled_norms().source.tensors.items()}
    artifact.save(compiled_norms(), saved, trained)
    assert torch.equal(artifact.load(saved).source.tensors["h.bias"].tensor, trained["h.bias"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="exists and is not a saved program"):
        artifact.save(compiled_norms(), tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "program"]


def test_a_program_read_back_through_the_public_door_reports_and_trains(tmp_path: Path) -> None:
    model, inputs = ZOO["unet"].build()
    program = parallelize(model, example_inputs=inputs)
    program.save(tmp_path / "p")
    read = load(tmp_path / "p")
    assert read.plan == program.plan
    assert "UNet" in read.report().text()
    losses = []
    for one in (program, read):
        with one.launch(lambda params: torch.optim.SGD(params, lr=0.1)) as running:
            losses.append([running.train_step(inputs, torch.zeros(len(inputs[0])), _square) for _ in range(2)])
    assert losses[0] == losses[1]


def _square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()
