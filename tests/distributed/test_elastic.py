"""torchrun starts the ranks again after one was killed, and training goes on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snnpart.vision.logs import read_metrics
from tests.distributed.pool import Pool

ROOT = Path(__file__).parents[2]
CONFIG = """
model = "tests.vision.nets:Plain"
dataset = "tests.distributed.jobs_vision:deadly"
batch_size = 2
epochs = 2
verify = "off"
checkpoint_every = 1
checkpoint_dir = "{folder}/run"
log = "{folder}/log"
[dataset_kwargs]
marker = "{folder}/killed"
[optimizer_kwargs]
lr = 0.01
"""


@pytest.mark.all
def test_a_killed_rank_is_started_again(pool: Pool, tmp_path: Path) -> None:
    """Rank 1 is killed in the middle of the first epoch; the losses are those of a run that was not disturbed."""
    (tmp_path / "train.toml").write_text(CONFIG.format(folder=tmp_path))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
    rendezvous = ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *rendezvous, "-m", "snnpart", "train", str(tmp_path / "train.toml")],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists() and "resumed from" in done.stderr
    lines = read_metrics(tmp_path / "log")
    config = {
        "model": "tests.vision.nets:Plain", "dataset": "tests.distributed.jobs_vision:waves", "batch_size": 2,
        "epochs": 2, "verify": "off", "optimizer_kwargs": {"lr": 0.01},
    }  # fmt: skip
    (_, undisturbed), _ = pool.run("tests.distributed.jobs_vision:called", ranks=2, command="train", config=config)
    for name in ("step", "train_loss", "validation_loss", "top1"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in undisturbed], rel=1e-9)
