"""tools/test, tools/quickstart and the environment they share; the quickstart's training in its short form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def test_help_of_both_scripts() -> None:
    for name in ("test", "quickstart"):
        done = shell(f"tools/{name} --help")
        assert done.returncode == 0 and f"tools/{name}" in done.stdout


def test_an_unknown_torch_is_a_usage_error() -> None:
    done = shell("tools/test --torch 1.0")
    assert done.returncode == 2 and "torch 1.0 is not one of those tested: 2.11, 2.14" in done.stdout


def test_shards_are_all_tests_once() -> None:
    """Three shards of ten tests; what is no shard is a usage error."""

    def kept(shard: str) -> list[int]:
        tests: list[int] = list(range(10))
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: shard, hook=hook), tests)  # type: ignore[arg-type]
        return tests

    assert kept("1/1") == list(range(10))
    assert sorted(kept("1/3") + kept("2/3") + kept("3/3")) == list(range(10))
    for odd in ("0/3", "4/3", "2", "a/b"):
        with pytest.raises(pytest.UsageError, match="give i/n with i from 1 to n"):
            kept(odd)


def test_a_right_environment_is_reused_and_a_stale_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/../calls"\n')
    python.chmod(0o755)
    script = 'source tools/environment.sh; use_environment 2.14 test; echo "python is $PYTHON"'
    first = shell(script, SNNPART_VENV=str(tmp_path))
    calls = (tmp_path / "calls").read_text()
    assert "installing snnpart[test] with torch 2.14" in first.stdout
    assert "-c tools/constraints-2.14.txt" in calls and f"python is {python}" in first.stdout
    second = shell(script, SNNPART_VENV=str(tmp_path))
    assert "using the environment in" in second.stdout and (tmp_path / "calls").read_text() == calls
    (tmp_path / ".snnpart-test").write_text("another")
    assert "installing" in shell(script, SNNPART_VENV=str(tmp_path)).stdout


def test_no_python_is_said() -> None:
    done = shell("source tools/environment.sh; PATH=/nowhere; find_python")
    assert done.returncode == 1 and "no Python 3.11 or newer was found" in done.stderr


def torchrun(*command: str, folder: Path, paths: tuple[Path, ...]) -> tuple[int, str]:
    """Exit code and everything printed by 4 processes; all of them are ended when they take too long."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launch, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        printed, _ = process.communicate(timeout=480)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on to its processes
        pytest.fail(f"too slow: {process.communicate(timeout=60)[0]}")


@pytest.mark.all
@pytest.mark.timeout(900)
def test_the_quickstart_trains_and_equals_one_process(tmp_path: Path) -> None:
    pytest.importorskip("snntorch")
    pytest.importorskip("sklearn")
    script = str(ROOT / "examples/digits.py")
    arguments = ("--framework", "snntorch", "--epochs", "1", "--output", str(tmp_path))
    code, printed = torchrun(script, *arguments, folder=tmp_path, paths=(ROOT,))
    assert code == 0, printed
    measured = json.loads((tmp_path / "training.json").read_text())
    assert measured["largest_difference"] <= 1e-5 and len(measured["one_process_losses"]) == 20
    assert measured["epochs"][-1]["validation_accuracy"] > 0.9
    assert {path.name for path in tmp_path.iterdir()} >= {"report.txt", "report.json", "report.html"}
    assert "epoch 1: loss" in printed and "\x1b" not in printed
    saved = (
        "-m",
        "snnpart",
        "run",
        str(tmp_path / "program"),
        "--data",
        str(tmp_path / "validation.npz"),
        "--evaluate",
    )
    code, printed = torchrun(*saved, folder=tmp_path, paths=(ROOT, ROOT / "examples"))
    accuracy = f"accuracy {100 * measured['epochs'][-1]['validation_accuracy']:.1f} %"
    assert code == 0 and accuracy in printed, printed
