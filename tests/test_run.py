"""`snnpart run`: a saved program is trained, evaluated and asked, by one process, by four, and by two nodes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from snnpart import artifact, datasets
from snnpart.api import parallelize
from snnpart.errors import ConfigError
from snnpart.graph import InputInfo
from snnpart.run import main
from tests.distributed.cases import Digits

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[1]


def save_digits(folder: Path, **topology: Any) -> Path:
    torch.manual_seed(0)
    program = parallelize(
        Digits(), example_inputs=torch.rand(2, 8, 1, 8, 8), input_layout="TNCHW", verify="off", **topology
    )
    artifact.save(program.compiled, folder)
    return folder


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    """torchrun with the arguments, in the project's root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, _ = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, out
    return out


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_train_evaluate_predict_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = str(save_digits(tmp_path / "p"))
    trained, answers = str(tmp_path / "trained"), str(tmp_path / "answers.npz")
    assert main([program, "--data", "digits", "--lr", "0.01", "--save", trained]) == 0
    losses = re.search(
        r"epoch 1: training loss ([\d.]+), validation loss ([\d.]+), accuracy ([\d.]+) %", capsys.readouterr().out
    )
    assert losses and float(losses[3]) > 60
    assert main([trained, "--data", "digits", "--evaluate"]) == 0
    assert f"evaluation: loss {losses[2]}, accuracy {losses[3]} % (359 samples)" in capsys.readouterr().out
    assert main([trained, "--data", "digits", "--predict", answers]) == 0
    assert np.load(answers)["outputs"].shape == (1797, 10)


def test_four_processes_and_one_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tp x pp in torchrun predicts what one process predicts, from a file of samples."""
    inputs = torch.rand(13, 2, 1, 8, 8, generator=torch.Generator().manual_seed(1)).numpy()
    np.savez(tmp_path / "data.npz", inputs=inputs)
    one, four = save_digits(tmp_path / "one"), save_digits(tmp_path / "four", tp=2, pp=2)
    run = ["--data", str(tmp_path / "data.npz"), "--batch", "5", "--predict"]
    assert main([str(one), *run, str(tmp_path / "a.npz")]) == 0
    finish(torchrun("--nproc-per-node=4", "-m", "snnpart", "run", str(four), *run, str(tmp_path / "b.npz")))
    a, b = np.load(tmp_path / "a.npz")["outputs"], np.load(tmp_path / "b.npz")["outputs"]
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.all
def test_two_nodes(tmp_path: Path) -> None:
    """Two torchrun agents on one host, each with one process: a pipeline over both."""
    program = save_digits(tmp_path / "p", pp=2)
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = [*nodes, "-m", "snnpart", "run", str(program), "--data", "digits", "--lr", "0.01"]
    agents = [torchrun(*command), torchrun(*command)]
    outputs = [finish(agent) for agent in agents]
    said = [line for text in outputs for line in text.splitlines() if line.startswith("epoch 1:")]
    assert len(said) == 1
    assert "accuracy" in said[0]


def test_named_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = str(save_digits(tmp_path / "p"))
    np.savez(tmp_path / "bad.npz", inputs=np.zeros((3, 1, 8, 8)))
    for arguments, code, text in [
        (["nowhere", "--data", "digits"], 1, "program.json cannot be read"),
        ([program, "--data", "nowhere.npz"], 1, "nowhere.npz cannot be read"),
        ([program, "--data", str(tmp_path / "bad.npz")], 1, "a sample of array 'inputs' has shape (1, 8, 8)"),
        ([program, "--data", "digits", "--epochs", "0"], 1, "--epochs 0 is not a positive number"),
        ([program], 2, "the following arguments are required: --data"),
    ]:
        assert main(arguments) == code
        assert text in capsys.readouterr().err


def test_digits_fill_several_layouts() -> None:
    for shape, batch, time in [((7, 64), 0, None), ((3, 7, 2, 4, 4), 1, 0), ((7, 3, 1, 16, 16), 0, 1)]:
        info = InputInfo("x", shape, torch.float32, batch, time)
        inputs, targets = datasets.read("digits", [info]).take(torch.arange(7))
        assert tuple(inputs[0].shape) == shape
        assert targets is not None and targets.tolist() == [0, 1, 2, 3, 4, 5, 6]
        if time is not None:
            assert torch.equal(inputs[0].select(time, 0), inputs[0].select(time, 1))
    with pytest.raises(ConfigError, match="cannot fill input 'x'"):
        datasets.read("digits", [InputInfo("x", (7, 3), torch.float32, 0)])
