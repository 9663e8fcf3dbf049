"""Training in one process: objects given in Python, kinds of targets, schedules over a resumed run, early errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from snnpart import vision
from snnpart.errors import CheckpointError, ConfigError
from snnpart.runtime.checkpoint import last_whole, read_model
from snnpart.vision.artifact import load_artifact
from snnpart.vision.evaluation import wide
from tests.vision.nets import Plain


def samples(kind: str = "class", count: int = 30) -> TensorDataset:
    """`count` images [1, 4, 4] with targets of a kind, for networks with 3 outputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    numbers = torch.arange(count) % 3
    targets = {
        "class": numbers,
        "int32": numbers.int(),
        "uint8": numbers.byte(),
        "values": x.flatten(1)[:, :3] * 0.1,
        "several": nn.functional.one_hot(numbers, 3),
    }
    return TensorDataset(x, targets[kind])


class OneStep(nn.Module):
    """Images [N, 1, 4, 4] to [N, 3], the same at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.head(x.flatten(1)))  # type: ignore[no-any-return]


class Single(nn.Module):
    """`Plain` in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain().float()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())  # type: ignore[no-any-return]


def trained(**fields: Any) -> dict[str, Any]:
    given = {"model": "tests.vision.nets:Plain", "dataset": samples, "batch_size": 8, "verify": "off"}
    return vision.train(vision.TrainingConfig(**{**given, **fields}))


def test_a_module_is_trained_saved_exported_and_answers(tmp_path: Path) -> None:
    """What no file can hold is left open in the files, and asked for where it is needed."""
    torch.manual_seed(3)
    found = trained(model=Plain(), checkpoint_dir=tmp_path / "runs", export=tmp_path / "artifact")
    artifact = load_artifact(tmp_path / "artifact")
    assert artifact.metadata["model"] is None
    assert artifact.metadata["dataset"] == "tests.vision.test_training:samples"
    given: dict[str, Any] = {"artifact": tmp_path / "artifact", "verify": "off"}
    again = vision.evaluate(vision.EvaluationConfig(model=Plain(), **given))
    assert again["loss"] == pytest.approx(found["validation_loss"], rel=1e-12)
    output = vision.predict(vision.PredictionConfig(model=Plain(), output=tmp_path / "answers.h5", **given))
    with h5py.File(output) as file:
        assert len(file["index"]) == 6 and json.loads(file.attrs["config"])["model"] is None
    with pytest.raises(ConfigError, match="the artifact does not say its model"):
        vision.evaluate(vision.EvaluationConfig(**given))


def test_data_given_as_an_object_is_asked_for(tmp_path: Path) -> None:
    trained(dataset=lambda: samples(), export=tmp_path / "artifact", model=Plain)
    assert load_artifact(tmp_path / "artifact").metadata["model"] == "tests.vision.nets:Plain"
    with pytest.raises(ConfigError, match="the artifact does not say its dataset"):
        vision.evaluate(vision.EvaluationConfig(artifact=tmp_path / "artifact"))


@pytest.mark.parametrize("kind", ["int32", "uint8"])
@pytest.mark.parametrize("fields", [{}, {"mixup_alpha": 0.5, "label_smoothing": 0.1}])
def test_class_numbers_of_any_width(kind: str, fields: dict[str, Any]) -> None:
    numbers = ("train_loss", "validation_loss", "top1")
    wanted = trained(**fields)
    found = trained(dataset_kwargs={"kind": kind}, **fields)
    assert [found[name] for name in numbers] == [wanted[name] for name in numbers]


def test_values_as_targets() -> None:
    found = trained(dataset_kwargs={"kind": "values"}, loss="mse", epochs=3)
    assert 0 < found["validation_loss"] < 2


def test_several_classes_a_sample_give_no_hits() -> None:
    found = trained(dataset_kwargs={"kind": "several"}, loss="torch.nn.MultiLabelMarginLoss")
    assert (found["top1"], found["top5"]) == (0.0, 0.0)


class Named:
    """Samples whose targets are a dict."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = samples()[index]
        return x, {"kind": y}


def named_loss(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(logits, targets["kind"])


def test_targets_in_a_dict(tmp_path: Path) -> None:
    wanted = trained()
    found = trained(dataset=Named, loss=named_loss, export=tmp_path / "artifact")
    assert (found["train_loss"], found["validation_loss"]) == (wanted["train_loss"], wanted["validation_loss"])
    assert found["top1"] == 0.0
    config = vision.PredictionConfig(artifact=tmp_path / "artifact", output=tmp_path / "out.h5", targets=True)
    with pytest.raises(ConfigError, match="targets that are no single tensor cannot be written"):
        vision.predict(config)


def test_half_precision_does_not_round_the_loss() -> None:
    """The mean over the samples of what the logits give, not of losses in bfloat16."""
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert wide(rows).dtype == torch.float32 and wide(rows.double()).dtype == torch.float64
    found = trained(model=Single, precision="bf16")["validation_loss"]
    assert torch.tensor(found * 6).bfloat16().double().item() != pytest.approx(found * 6, rel=1e-9)


def test_no_validation_samples() -> None:
    with pytest.raises(ConfigError, match="the validation part of the data is empty"):
        trained(dataset=lambda: (samples(), Subset(samples(), [])))


@pytest.mark.parametrize("readout", ["mean", "sum", "last"])
def test_a_model_of_one_step_without_state(readout: str, tmp_path: Path) -> None:
    """Its outputs are equal at every step; they are read out over T nonetheless."""
    found = trained(model=OneStep, time_steps=3, readout=readout, export=tmp_path / "artifact")
    model = load_artifact(tmp_path / "artifact").load_into(OneStep())
    x, y = samples().tensors
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))[24:]
    logits = model(x[order]) * (3 if readout == "sum" else 1)
    wanted = nn.functional.cross_entropy(logits, y[order])
    assert found["validation_loss"] == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.parametrize(
    "fields",
    [
        {"scheduler": "onecycle", "scheduler_interval": "step"},
        {"scheduler": "cosine", "warmup": 2, "scheduler_interval": "step"},
        {"scheduler": "step"},
        {"scheduler": "torch.optim.lr_scheduler.ReduceLROnPlateau", "scheduler_kwargs": {"patience": 0}},
        {"scheduler": "cosine", "accumulate": 2, "batch_size": 4, "mixup_alpha": 0.4, "ema": 0.9},
    ],
)
def test_a_schedule_goes_on_where_it_was(fields: dict[str, Any], tmp_path: Path) -> None:
    """Three epochs of three steps, ended within the second by `max_steps` and resumed: as if they had not been."""
    given = {"epochs": 3, "optimizer_kwargs": {"lr": 0.02}, **fields}
    wanted = trained(**given, checkpoint_dir=tmp_path / "whole")
    trained(**given, checkpoint_dir=tmp_path / "parts", max_steps=5)
    found = trained(**given, checkpoint_dir=tmp_path / "parts")
    for name in ("step", "train_loss", "validation_loss", "lr"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-9), name
    for mirror in ("model", "ema") if "ema" in fields else ("model",):
        whole, parts = (read_model(last_whole(tmp_path / name) or Path(), mirror) for name in ("whole", "parts"))
        assert whole
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)


def test_a_schedule_that_is_over_says_so(tmp_path: Path) -> None:
    given = {"scheduler": "onecycle", "scheduler_interval": "step", "checkpoint_dir": tmp_path}
    trained(**given)
    with pytest.raises(ConfigError, match=r"scheduler: Tried to step \d+ times.*\n.*resume with the epochs"):
        trained(**given, epochs=2)


def test_resuming_from_a_path(tmp_path: Path) -> None:
    trained(checkpoint_dir=tmp_path / "runs", epochs=2)
    first = tmp_path / "runs" / "step-00000003"
    found = trained(checkpoint_dir=tmp_path / "others", epochs=2, resume=first)
    assert found == pytest.approx({**found, "step": 6, "epoch": 2})
    with pytest.raises(CheckpointError, match="holds checkpoints and is none\n  valid: step-00000006, step-00000003"):
        trained(checkpoint_dir=tmp_path / "others", epochs=2, resume=tmp_path / "runs")
    with pytest.raises(ConfigError, match="resume = .*nowhere' is not a checkpoint's folder\n  valid: auto, never"):
        trained(checkpoint_dir=tmp_path, resume="nowhere")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer_kwargs": {"lr": -1.0}}, "optimizer: Invalid learning rate: -1.0"),
        ({"optimizer_kwargs": {"rate": 1.0}}, "optimizer: .*'rate'.*\n  valid: params, lr"),
        ({"scheduler": "torch.optim.lr_scheduler.ReduceLROnPlateau", "warmup": 1}, "follows the validation loss"),
        ({"log": "file"}, "log = .*file cannot be written: File exists"),
    ],
)
def test_what_cannot_be_used(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    if "log" in fields:
        fields = {"log": tmp_path / fields["log"]}
    with pytest.raises(ConfigError, match=message):
        trained(**fields)


def test_a_place_that_cannot_take_the_artifact_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists and is not an artifact"):
        trained(export=tmp_path)
    assert capsys.readouterr().out == ""
