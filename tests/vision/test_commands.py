"""The commands: flags from the dataclass, the file and the flags together, and errors with exit codes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import h5py
import pytest

from snnpart.vision.commands import CONFIGS, configured, descriptions, example, main, parser_of
from snnpart.vision.config import EvaluationConfig, PredictionConfig, TrainingConfig

DIGITS = """
model = "tests.vision.nets:Digits"
batch_size = 128
verify = "off"
[model_kwargs]
width = 4
"""


@pytest.mark.parametrize("command", CONFIGS)
def test_every_field_is_a_described_flag(command: str) -> None:
    cls = CONFIGS[command]
    flags = {action.dest for action in parser_of(command)._actions}
    assert set(cls.__dataclass_fields__) <= flags
    missing = set(cls.__dataclass_fields__) - set(descriptions(cls))
    assert not missing, f"no description of {missing}"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(DIGITS)
    arguments = [str(path), "--batch-size", "8", "--model-kwargs", "steps=5", "--deterministic", "--grad-clip", "0.5"]
    config = configured(TrainingConfig, vars(parser_of("train").parse_args(arguments)))
    assert (config.batch_size, config.grad_clip, config.deterministic) == (8, 0.5, True)
    assert config.model_kwargs == {"width": 4, "steps": 5}
    assert config.model == "tests.vision.nets:Digits"


@pytest.mark.parametrize("cls", [TrainingConfig, EvaluationConfig, PredictionConfig])
def test_the_example_reads_back(cls: type) -> None:
    text = example(cls)
    data = tomllib.loads(text)
    assert data["model"] == "sew_resnet18" and set(data) <= {field.name for field in fields(cls)}
    uncommented = "\n".join(line.removeprefix("# ") if line.endswith("= 32") else line for line in text.splitlines())
    assert tomllib.loads(uncommented)["batch_size"] == 32


def test_init_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert main("init", [str(path)]) == 0
    TrainingConfig.from_toml(path)
    assert main("init", [str(path)]) == 1
    assert "exists" in capsys.readouterr().err


def test_train_export_evaluate_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = tmp_path / "train.toml", tmp_path / "run"
    path.write_text(DIGITS + "[optimizer_kwargs]\nlr = 0.01\n")
    text = path.read_text().replace("[model_kwargs]", f'checkpoint_dir = "{run}"\n[model_kwargs]', 1)
    path.write_text(text)
    assert main("train", [str(path), "--max-steps", "3"]) == 0
    assert main("export", [str(path), str(tmp_path / "artifact")]) == 0
    common = ["--artifact", str(tmp_path / "artifact"), "--verify", "off", "--batch-size", "128"]
    assert main("evaluate", common) == 0
    assert main("predict", [*common, "--output", str(tmp_path / "out.h5"), "--split", "all"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    epoch, evaluation, prediction = lines
    assert epoch["step"] == 3 and evaluation["loss"] == epoch["validation_loss"]
    assert prediction["samples"] == 1797
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["logits"].shape == (1797, 10)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--nonsense"], 2, "unrecognized arguments: --nonsense"),
        (["none.toml"], 1, "ConfigError: none.toml cannot be read"),
        (["--model", "tests.vision.nets:Nothing"], 1, "'tests.vision.nets' has no 'Nothing'"),
        (["--model", "sew_resnet"], 1, "model = 'sew_resnet' is not known"),
        (
            ["--model", "tests.vision.nets:Digits", "--model-kwargs", "depth=3"],
            1,
            "unexpected keyword argument 'depth'",
        ),
        (["--model", "tests.vision.nets:Digits", "--dataset", "cifar"], 1, "dataset = 'cifar' is not known"),
        (["--model", "tests.vision.nets:Digits", "--input-layout", "NTCHW"], 1, "4 dims are wanted: T C H W"),
        (
            ["--model", "tests.vision.nets:Plain", "--verify", "off", "--dataset", "digits"],
            1,
            "Error: ",
        ),
    ],
)
def test_what_goes_wrong(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main("train", arguments) == code
    assert message in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("snnpart.vision.train", stopped)
    assert main("train", ["--model", "tests.vision.nets:Digits"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
