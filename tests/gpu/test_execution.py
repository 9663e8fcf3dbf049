"""Captured train steps on GPUs are eager ones, for every mode, precision and topology.

Float32 without TF32 over 20 steps with a falling learning rate, two uneven batches and a launch in the middle that
takes over weights and optimizer. bfloat16 lies within what reruns of the eager steps differ by.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.jobs_execution import FEW, TOPOLOGIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).parents[2]


class Runs:
    """Results of cases by name; all cases that need as many ranks run in one go when the first is asked for."""

    def __init__(self, folder: Path, device: str = "cuda") -> None:
        self._folder, self._device, self._found = folder, device, dict[str, Any]()

    def __getitem__(self, case: str) -> dict[str, Any]:
        if case not in self._found:
            ranks = TOPOLOGIES[case.split(":")[0]][0]
            groups = (SMALL, CASES if self._device == "cuda" else SHARED)
            together = next((group for group in groups if case in group), [case])
            self._run(ranks, [c for c in together if TOPOLOGIES[c.split(":")[0]][0] == ranks])
        result: dict[str, Any] = self._found[case]
        assert "error" not in result, f"{case}: {result['error']}"
        return result

    def _run(self, ranks: int, cases: list[str]) -> None:
        """Run the cases; after one that fails, the others in new processes."""
        left, path = list(cases), self._folder / f"{ranks}.pt"
        while left:
            path.unlink(missing_ok=True)
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *launcher, "-m", "tests.gpu.jobs_execution", str(path), *left]
            environment = {**os.environ, "CASE_DEVICE": self._device}
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
                )
                said = done.stderr
            except subprocess.TimeoutExpired as error:
                said = f"timed out: {(error.stderr or b'')[-3000:]!r}"
            made = torch.load(path, weights_only=False) if path.exists() else {}
            self._found |= made
            left = [case for case in left if case not in made]
            if left and not any("error" in result for result in made.values()):
                self._found[left.pop(0)] = {"error": said[-3000:]}


MODES = ("eager", "cuda_graph")
OTHERS = ("single", "ddp2", "fsdp2", "tp2", "pp2-1f1b")
"""Topologies of the small cases, in all modes."""
CASES = [f"{name}:{mode}:fp32" for name in TOPOLOGIES for mode in MODES]
SMALL = [f"{name}:{mode}:small" for name in OTHERS for mode in ("eager", "auto", "compile")]
SHARED = [f"{name}:eager:fp64" for name in TOPOLOGIES if TOPOLOGIES[name][0] == 2]
CASES += [f"{name}:{mode}:{precision}" for name in TOPOLOGIES for mode in MODES for precision in ("bf16", "fp16")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """Two ranks on one GPU, and two on the CPU."""
    return {device: Runs(tmp_path_factory.mktemp("shared"), device) for device in ("cuda:0", "cpu")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("execution"))


def needs(name: str) -> None:
    ranks = TOPOLOGIES[name][0]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_float32_steps_are_eager_steps(runs: Runs, name: str) -> None:
    needs(name)
    want, got = runs[f"{name}:eager:fp32"], runs[f"{name}:cuda_graph:fp32"]
    assert got["captured"] >= 1, got["notices"]
    assert len(set(want["losses"])) == len(want["losses"])
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-4) and want["norm"] > 0
    for key, value in want["state"].items():
        torch.testing.assert_close(got["state"][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["auto", "compile"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_modes_are_eager_steps(runs: Runs, name: str, mode: str) -> None:
    """In float64, as a compiled kernel has other last bits, which a spiking network makes much of."""
    needs(name)
    want, got = runs[f"{name}:eager:small"], runs[f"{name}:{mode}:small"]
    assert (got["captured"] >= 1) == (mode == "auto"), got["notices"]
    assert (got["compiled"] > 0) == (mode == "compile") and want["compiled"] == 0
    assert len(set(want["losses"])) == FEW
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-9) and want["norm"] > 0
    torch.testing.assert_close(got["outputs"], want["outputs"], rtol=1e-9, atol=1e-9)
    for key, value in want["state"].items():
        torch.testing.assert_close(got["state"][key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_half_precision_steps_are_eager_steps(runs: Runs, name: str, precision: str) -> None:
    """The kernels are deterministic here, so that eager reruns do not differ at all: captured ones may not either."""
    needs(name)
    want, got = runs[f"{name}:eager:{precision}"], runs[f"{name}:cuda_graph:{precision}"]
    assert got["captured"] >= 1, got["notices"]
    assert want["losses"] != runs[f"{name}:eager:fp32"]["losses"]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)


def test_two_ranks_that_share_a_gpu_run_uncaptured(tmp_path: Path) -> None:
    """Through gloo, which no graph can hold: the steps are the same."""
    shared = Runs(tmp_path, "cuda:0")
    want, got = shared["ddp2:eager:fp32"], shared["ddp2:cuda_graph:fp32"]
    assert got["captured"] == 0
    assert any("another backend than NCCL" in notice for notice in got["notices"])
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)


@pytest.mark.parametrize("case", SHARED)
def test_float64_steps_of_ranks_that_share_a_gpu_are_those_on_the_cpu(shared: dict[str, Runs], case: str) -> None:
    """Every topology with the kernels of GPUs, also where only one is there: through gloo, uncaptured."""
    want, got = shared["cpu"][case], shared["cuda:0"][case]
    assert len(set(want["losses"])) == len(want["losses"])
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-9) and want["norm"] > 0
    torch.testing.assert_close(got["outputs"], want["outputs"], rtol=1e-9, atol=1e-9)
    for key, value in want["state"].items():
        torch.testing.assert_close(got["state"][key], value, rtol=1e-9, atol=1e-9)
