"""Configurations check themselves, say what is wrong with which field, and come back from what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from snnpart.errors import ConfigError
from snnpart.vision.config import EvaluationConfig, PredictionConfig, TrainingConfig
from snnpart.vision.session import compile_options

MODEL = "tests.nets:Net"


def test_round_trip() -> None:
    given: dict[str, Any] = {"grad_clip": 1, "checkpoint_dir": "runs"}
    config = TrainingConfig(model=MODEL, model_kwargs={"classes": 3}, tp=2, scheduler="cosine", **given)
    again = TrainingConfig.from_dict(config.to_dict())
    assert again == config
    assert config.grad_clip == 1.0 and isinstance(config.grad_clip, float) and config.checkpoint_dir == Path("runs")


def test_toml_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('model = "sew_resnet18"\ntp = 2\n[model_kwargs]\nnum_classes = 7\n')
    config = TrainingConfig.from_toml(path, {"tp": 4})
    assert (config.model, config.tp, config.model_kwargs) == ("sew_resnet18", 4, {"num_classes": 7})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batchsize": 3}, "there is no field 'batchsize'\n  to mend it: did you mean 'batch_size'?"),
        ({"batch_size": 0}, "batch_size = 0 is not positive"),
        ({"batch_size": "many"}, "batch_size = 'many' is not a whole number"),
        ({"batch_size": True}, "batch_size = True is not a whole number"),
        ({"precision": "fp64"}, "precision = 'fp64' is not a choice\n  valid: fp32, bf16, fp16"),
        ({"time_steps": 1.5}, "time_steps = 1.5 is not a whole number"),
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0 is not in [0, 1)"),
        ({"label_smoothing": 0.1, "loss": "mse"}, "label_smoothing goes with loss = 'cross_entropy'"),
        ({"ema": 1.0}, "ema = 1.0 is not between 0 and 1"),
        ({"checkpoint_every": 5}, "checkpoints were asked for, but not where\n  to mend it: set checkpoint_dir"),
        ({"input_layout": "CHW"}, "input_layout='CHW' must hold N (batch) once"),
        ({"device": "gpu0"}, "device = 'gpu0' is not a device"),
        ({"workers": -1}, "workers = -1 is not 0 or more"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfig.from_dict({"model": MODEL, **fields})
    assert message in str(caught.value)


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        TrainingConfig()


def test_an_output_is_needed() -> None:
    with pytest.raises(ConfigError, match="PredictionConfig needs output"):
        PredictionConfig.from_dict({"artifact": "x"})


def test_weights_come_from_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give artifact or checkpoint"):
        EvaluationConfig(model=MODEL)
    with pytest.raises(ConfigError, match="give artifact or checkpoint"):
        EvaluationConfig(model=MODEL, artifact=tmp_path, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="a checkpoint holds no model"):
        EvaluationConfig(checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        EvaluationConfig(artifact="nowhere")  # type: ignore[arg-type]


def test_a_module_runs_but_is_not_written() -> None:
    config = TrainingConfig(model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="model is a Linear, which a file cannot hold"):
        config.to_dict()
    with pytest.raises(ConfigError, match="model_kwargs were given with a module"):
        TrainingConfig(model=nn.Linear(2, 2), model_kwargs={"a": 1})


def test_broken_toml_says_where(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("model = \n")
    with pytest.raises(ConfigError, match="line 1"):
        TrainingConfig.from_toml(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainingConfig.from_toml(tmp_path / "none.toml")


def test_a_run_on_a_gpu_asks_for_its_kernels() -> None:
    """The model is made on the CPU, so what it lies on says nothing."""
    for device, kernels in (("cpu", (False, False)), ("cuda:1", (True, "auto"))):
        options = compile_options(TrainingConfig(model=MODEL, device=device), torch.rand(3, 8, 8))
        assert (options["fuse"], options["channels_last"]) == kernels
