"""A user's way on one GPU: train, go on from a checkpoint, evaluate, predict and profile, from the command line.

In float64 all of it comes out as on the CPU, with captured steps and fused neurons; bfloat16 runs as users run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("spikingjelly")
pytest.importorskip("sklearn")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROOT = Path(__file__).parents[2]
DEVICE = os.environ.get("CASE_DEVICE", "cuda")
SAME = ("train_loss", "validation_loss", "top1", "top5", "step")
CONFIG = """
model = "tests.gpu.vision_nets:Digits"
dataset = "tests.gpu.vision_nets:few"
batch_size = 48
epochs = 2
optimizer_kwargs = { lr = 0.002 }
scheduler = "cosine"
scheduler_interval = "step"
grad_clip = 1.0
verify = "full"
"""


def snnpart(*arguments: object) -> str:
    """What `python -m snnpart ...` prints; it must end well."""
    command = [sys.executable, "-m", "snnpart", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision")
    (made / "train.toml").write_text(CONFIG)
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Epochs of a run on the GPU, of one that was stopped in the second epoch and went on, and of one on the CPU."""
    train = ("train", folder / "train.toml")
    last = {"gpu": snnpart(*train, "--device", DEVICE, "--export", folder / "gpu")}
    stops = ("--device", DEVICE, "--checkpoint-dir", folder / "checkpoints")
    snnpart(*train, *stops, "--max-steps", 10)
    last["resumed"] = snnpart(*train, *stops, "--export", folder / "resumed")
    last["cpu"] = snnpart(*train, "--device", "cpu", "--verify", "off", "--export", folder / "cpu")
    return {name: lines(text) for name, text in last.items()}


def assert_same_weights(folder: Path, one: str, other: str) -> None:
    first, second = (load_file(folder / name / "model.safetensors") for name in (one, other))
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-9, atol=1e-9)


def test_training_on_the_gpu_is_that_on_the_cpu(runs: dict[str, Any], folder: Path) -> None:
    assert len(runs["gpu"]) == len(runs["cpu"]) == 2
    for got, want in zip(runs["gpu"], runs["cpu"], strict=True):
        assert [got[name] for name in SAME] == pytest.approx([want[name] for name in SAME], rel=1e-9)
    assert runs["gpu"][1]["train_loss"] < runs["gpu"][0]["train_loss"]
    assert_same_weights(folder, "gpu", "cpu")


def test_a_resumed_run_is_one_that_never_stopped(runs: dict[str, Any], folder: Path) -> None:
    got, want = runs["resumed"][-1], runs["gpu"][-1]
    assert [got[name] for name in SAME] == pytest.approx([want[name] for name in SAME], rel=1e-9)
    assert_same_weights(folder, "resumed", "gpu")


def test_evaluation_and_prediction_of_the_artifact(runs: dict[str, Any], folder: Path) -> None:
    """With folded norms too; the last batch is smaller."""
    given = ("--artifact", folder / "gpu", "--batch-size", 30, "--numerics", "fold")
    (found,) = lines(snnpart("evaluate", *given, "--device", DEVICE))
    assert found["loss"] == pytest.approx(runs["gpu"][-1]["validation_loss"], rel=1e-9)
    assert found["samples"] == 100
    logits = {}
    for device, verify in ((DEVICE, "full"), ("cpu", "off")):
        snnpart("predict", *given, "--device", device, "--verify", verify, "--output", folder / f"{device}.h5")
        with h5py.File(folder / f"{device}.h5") as file:
            logits[device] = file["logits"][:]
    assert logits[DEVICE].shape == (100, 10) and len(np.unique(logits["cpu"], axis=0)) > 90
    np.testing.assert_allclose(logits[DEVICE], logits["cpu"], rtol=1e-9, atol=1e-9)


def test_training_in_bfloat16_and_its_profile(folder: Path) -> None:
    data = ("--dataset", "digits", "--dataset-kwargs", "channels=3")
    plain = ("--model-kwargs", "double=False", "--precision", "bf16", "--device", DEVICE, "--epochs", 2, *data)
    epochs = lines(snnpart("train", folder / "train.toml", *plain))
    losses = [epoch["train_loss"] for epoch in epochs]
    assert losses == sorted(losses, reverse=True) and epochs[-1]["top1"] > 0.5, epochs
    network = ("tests.gpu.vision_nets:Digits", "--arg", "double=False", "--input", "float32[64,3,8,8]")
    text = snnpart("profile", *network, "--precision", "bf16")
    assert "predicted" in text and "fused neuron forward" in text and "uncaptured" not in text, text
